"""How long does a step take over a slow link, in the fixed order and in one fitted to the link, against simulation?

Processes on this machine communicate over gloo with a link that delays every message. Compute is a sleep, so that
processes do not compete for cores. Costs are measured once per topology and latency; both plans are simulated with
them. ``measured`` is the edge's median time for a whole step, including its handshake. Every plan's gradients are
compared with those of the unsplit model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from delayed_lane import delay
from harness import Row, column, parse, parser, run
from picture import Picture
from torch import nn

import ldt
from ldt.cli.units import seconds
from ldt.plan import Costs, optimize, simulate, ushape
from ldt.testing import SleepingChunk, toy_loss, toy_microbatches, unsplit_step

WIDTH = 16
EDGE_SHARE = 0.25  # seconds of compute of the head and the tail, and of a middle chunk


@dataclass(frozen=True)
class StepRow:
    """One plan on one topology at one latency."""

    PICTURE: ClassVar[Picture] = Picture("latency", ("simulated", "measured"), ("topology", "plan"))
    topology: str = column("topology", "<34")
    latency: float = column("latency ms", ">10.0f")
    plan: str = column("plan", "<18")
    simulated: float = column("simulated ms", ">12.1f")
    measured: float = column("measured ms", ">12.1f")
    error: float = column("off by", ">7.1%")
    wrong: int = column("#wrong", ">7")


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    for stages in arguments.stages:
        for laps in arguments.laps:
            for latency in arguments.latency:
                topology = ldt.Topology([1] * stages, laps=laps)
                if dist.get_rank() < stages:
                    yield from measure_topology(topology, latency, arguments)
                dist.barrier()


def measure_topology(topology: ldt.Topology, latency: float, arguments: argparse.Namespace) -> Iterator[Row]:
    chunks = make_chunks(topology, arguments.forward)
    batch = toy_microbatches(arguments.microbatches, WIDTH)
    _, reference = unsplit_step(make_chunks(topology, 0.0), batch, toy_loss)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        delay(mesh, latency)
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        costs = Costs.measure(ldt.Pipeline(mine, mesh, loss_fn=toy_loss), batch if mesh.is_edge else None)
        plans = {
            "ushape": ushape(topology, len(batch)),
            "optimize": optimize(topology, len(batch), costs),
            "optimize, split": optimize(topology, len(batch), costs, split_backward=True),
        }
        for name, plan in plans.items():
            times, wrong = run_steps(
                ldt.Pipeline(mine, mesh, plan, toy_loss), batch, reference, arguments.steps
            )
            expected = simulate(plan, costs).makespan
            took = statistics.median(times)
            error = took / expected - 1
            text = topology.to_text()
            yield StepRow(text, latency * 1e3, name, expected * 1e3, took * 1e3, error, wrong)


def make_chunks(topology: ldt.Topology, forward: float) -> list[nn.Module]:
    torch.manual_seed(0)
    shares = [EDGE_SHARE, *[1.0] * (topology.num_chunks - 2), EDGE_SHARE]
    return [SleepingChunk(WIDTH, forward * share, forward * share) for share in shares]


def run_steps(
    pipeline: ldt.Pipeline,
    batch: list[tuple[torch.Tensor, torch.Tensor]],
    reference: list[nn.Module],
    steps: int,
) -> tuple[list[float], int]:
    """Return the seconds of each step except the first, and the wrong elements of all gradients."""
    mesh, times, wrong = pipeline.mesh, [], 0
    theirs = [reference[index] for index in mesh.topology.chunks_of(mesh.stage)]
    for _ in range(steps + 1):
        for chunk in pipeline.chunks:
            chunk.zero_grad()
        result = pipeline.step(batch if mesh.is_edge else None)
        times.append(result.stats.seconds)
        grads = [
            [p.grad for p in nn.ModuleList(modules).parameters()] for modules in (pipeline.chunks, theirs)
        ]
        wrong += sum(int(torch.ne(a, b).sum()) for a, b in zip(*grads, strict=True))
    return times[1:], int(mesh.control.sum([wrong])[0])


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0], transports=False)
    options.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4], help="numbers of stages")
    options.add_argument("--laps", type=int, nargs="+", default=[1, 2])
    options.add_argument("--latency", type=seconds, nargs="+", default=[0.0, 0.02, 0.04], help="0 20ms 40ms")
    options.add_argument(
        "--forward", type=seconds, default=0.02, help="of a chunk in the middle; backward: twice"
    )
    options.add_argument("--microbatches", type=int, default=16)
    options.add_argument("--steps", type=int, default=3, help="counted steps of each plan")
    options.set_defaults(device="cpu")
    given = parse(options, lambda given: max(given.stages))
    if given.device != "cpu":
        options.error("the delayed link is one of the host: expected --device cpu, got --device cuda")
    context = (
        f"{given.microbatches} microbatches, forward {given.forward * 1e3:g} ms, backward twice that, edge chunks "
        f"{EDGE_SHARE} of it"
    )
    sys.exit(run(measure, given, context))
