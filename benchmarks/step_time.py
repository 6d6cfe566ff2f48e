"""How long does a U-shaped training step take, against its own simulation and torch.distributed.pipelining?

The model is a transformer over stages of ``--tp`` ranks; stage 0 has the first and the last layers. Paths:

- ``ldt ushape``, ``ldt optimize``  over lanes of each transport: the fixed order, and the one planned from the costs
- ``ldt ushape, <transport>, 8bit`` and so on  with ``--compression``: the same with packed messages: the time to pack
  shows, as no link here is slow, and ``#wrong`` counts what packing changed
- ``torch ushape``, ``torch optimize``  the same compute orders and chunks in torch's own runtime
- ``torch 1F1B, no U``  torch's one-forward-one-backward with as many layers on each stage, in a row: the time of a step
  without the U

Costs are measured once, over the last transport, which disturbs compute the least, and every plan is simulated with
them. ``measured`` is the median time of a step on the host, from a barrier until the current stream is done, on the
slowest rank; paths alternate. Gradients of the first and the last step of each path are compared with the unsplit
model's, which every rank computes. If the number of microbatches is a power of two, all paths add the same sums in the
same order; ``#unequal`` counts elements that differ nevertheless (attention on a GPU may add in any order), ``#wrong``
those that differ by more than 1e-5 (bf16: 1/64) of their tensor's largest element. ``bounced`` is the share of messages
that did not go directly into posted memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Protocol

import torch
from bounces import Bounces
from clock import settle, slowest, total
from harness import Row, column, parse, parser, run
from picture import Picture
from torch import nn
from torch_pipelines import Step, step_in_a_row, step_of_plan
from transformer import PRESETS, Microbatch, Setting, cut, make_layers, make_microbatches, mean_squared_error
from transports import connect_each, device_of, note

import ldt
from ldt.plan import Costs, Plan, optimize, simulate, ushape
from ldt.runtime.common.device import synchronize_current_stream

WARM_UP = 2


@dataclass(frozen=True)
class StepRow:
    """One path in one setting."""

    PICTURE: ClassVar[Picture] = Picture("path", ("measured", "ratio"), ("setting",))
    setting: str = column("setting", "<30")
    count: int = column("count", ">6")
    path: str = column("path", "<28")
    simulated: float | None = column("simulated ms", ">12.2f")
    measured: float = column("measured ms", ">12.2f")
    ratio: float | None = column("ratio", ">7.3f")
    bounced: float | None = column("bounced", ">8.0%")
    unequal: int = column("#unequal", ">9")
    wrong: int = column("#wrong", ">7")


@dataclass
class StepPath:
    """A way to run a step on this rank, the modules that receive its gradients, and the bounces of its lanes."""

    name: str
    step: Step
    simulated: float | None
    modules: Sequence[nn.Module]
    bounces: Bounces


class Compared(Protocol):
    """A model whose gradients can be cleared, and compared with the expected ones, as ``Model`` does."""

    def forget(self) -> None: ...

    def compare(self, modules: Sequence[nn.Module]) -> tuple[int, int]: ...


class Model:
    """The layers, a step's microbatches, and the expected gradients."""

    def __init__(self, setting: Setting, topology: ldt.Topology, device: torch.device) -> None:
        self.topology = topology
        self.layers = make_layers(setting, topology, device)
        self.chunks = cut(self.layers, setting.chunk_layers(topology))
        self.stages = cut(self.layers, setting.stage_layers(topology))
        self.microbatches = make_microbatches(setting, device)
        self._tolerance = 1 / 64 if setting.dtype == torch.bfloat16 else 1e-5
        self._truth = self._unsplit()

    def chunks_of(self, stage: int) -> dict[int, nn.Module]:
        return {index: self.chunks[index] for index in self.topology.chunks_of(stage)}

    def forget(self) -> None:
        """Clear all gradients."""
        for layer in self.layers:
            layer.zero_grad()

    def compare(self, modules: Sequence[nn.Module]) -> tuple[int, int]:
        """Return how many of this rank's gradient elements differ from the unsplit model's, and how many are wrong."""
        mine = {id(parameter) for module in modules for parameter in module.parameters()}
        unequal = wrong = 0
        for parameter, expected in self._truth:
            if id(parameter) not in mine:
                continue
            got = torch.full_like(expected, torch.nan) if parameter.grad is None else parameter.grad
            off = (got - expected).abs()
            right = off <= self._tolerance * expected.abs().max()  # also true for NaN
            unequal += int((off != 0).sum())
            wrong += int((~right).sum())
        return unequal, wrong

    def _unsplit(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        for inputs, target in self.microbatches:
            output = inputs
            for layer in self.layers:
                output = layer(output)
            torch.autograd.backward(mean_squared_error(output, target) / len(self.microbatches))
        parameters = [parameter for layer in self.layers for parameter in layer.parameters()]
        grads = [parameter.grad for parameter in parameters]
        self.forget()
        return [(p, grad) for p, grad in zip(parameters, grads, strict=True) if grad is not None]


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    device, topology = device_of(arguments), ldt.Topology(arguments.tp)
    meshes = connect_all(topology, arguments)
    with ExitStack() as stack:
        for mesh in meshes.values():
            stack.enter_context(mesh)
        for name in arguments.preset:
            setting = setting_of(name, arguments)
            text = f"{name} h{setting.hidden} s{setting.sequence} M{setting.microbatches}"
            model = Model(setting, topology, device)
            paths = paths_of(model, meshes)
            yield from rows_of(text, model, paths, arguments.steps, device)
            del model, paths  # free memory for the next one


def connect_all(topology: ldt.Topology, arguments: argparse.Namespace) -> Mapping[str, ldt.Mesh]:
    """Return a mesh over each transport, the one that costs are measured over last, and those that pack before."""
    meshes = connect_each(topology, arguments)
    if arguments.compression == "none":
        return meshes
    packed = connect_each(topology, arguments, compression=arguments.compression)
    return {f"{name}, {arguments.compression}": mesh for name, mesh in packed.items()} | dict(meshes)


def setting_of(name: str, arguments: argparse.Namespace) -> Setting:
    """Return the preset with the given options in its place."""
    options = {field.name: getattr(arguments, field.name) for field in fields(Setting)}
    return replace(PRESETS[name], **{option: value for option, value in options.items() if value is not None})


def paths_of(model: Model, meshes: Mapping[str, ldt.Mesh]) -> list[StepPath]:
    """Return all paths, ready to run."""
    topology, number = model.topology, len(model.microbatches)
    mesh = list(meshes.values())[-1]
    chunks = model.chunks_of(mesh.stage)
    mine = list(chunks.values())
    batch = model.microbatches if mesh.is_edge else None
    costs = measured_costs(ldt.Pipeline(mine, mesh, loss_fn=mean_squared_error), batch)
    plans = {"ushape": ushape(topology, number), "optimize": optimize(topology, number, costs)}
    makespans = {name: simulate(plan, costs).makespan for name, plan in plans.items()}
    paths = [
        StepPath(
            f"ldt {name}, {transport}",
            ldt_step(mine, model.microbatches, mesh, plan),
            makespans[name],
            mine,
            Bounces(mesh.all_lanes()),
        )
        for transport, mesh in meshes.items()
        for name, plan in plans.items()
    ]
    if set(topology.tp) != {1}:
        note(
            f"torch.distributed.pipelining is left out: it has no stages of several ranks, as in {topology.to_text()}"
        )
        return paths
    for name, plan in plans.items():
        step = step_of_plan(plan, chunks, model.microbatches, mean_squared_error)
        paths.append(StepPath(f"torch {name}", step, makespans[name], mine, Bounces([])))
    stage = model.stages[mesh.stage]
    step = step_in_a_row(stage, model.microbatches, mean_squared_error)
    return [*paths, StepPath("torch 1F1B, no U", step, None, [stage], Bounces([]))]


def measured_costs(pipeline: ldt.Pipeline, batch: object) -> Costs:
    """Return the measured costs, and report them in a note."""
    costs = Costs.measure(pipeline, batch)
    figures = {"forward": costs.forward, "backward": costs.backward}
    for name, seconds in figures.items():
        assert isinstance(seconds, Sequence)
        note(f"{name} of each chunk: {', '.join(f'{value * 1e3:.2f}' for value in seconds)} ms")
    return costs


def ldt_step(
    modules: Sequence[nn.Module], microbatches: Sequence[Microbatch], mesh: ldt.Mesh, plan: Plan
) -> Step:
    pipeline = ldt.Pipeline(modules, mesh, plan, mean_squared_error)
    batch = microbatches if mesh.is_edge else None
    return lambda: pipeline.step(batch)


def rows_of(
    text: str, model: Compared, paths: Sequence[StepPath], steps: int, device: torch.device
) -> Iterator[StepRow]:
    times: list[list[float]] = [[] for _ in paths]
    differ = [[0, 0] for _ in paths]
    last = WARM_UP + steps - 1
    for turn in range(last + 1):  # paths alternate
        for path, taken, counts in zip(paths, times, differ, strict=True):
            model.forget()
            path.bounces.start()
            settle(device)
            start = time.perf_counter()
            path.step()
            synchronize_current_stream(device)
            taken.append(time.perf_counter() - start)
            path.bounces.stop()
            if turn in (0, last):
                counts[:] = map(sum, zip(counts, model.compare(path.modules), strict=True))
    for path, taken, counts in zip(paths, times, differ, strict=True):
        seconds = statistics.median(slowest(taken[WARM_UP:]))
        simulated = None if path.simulated is None else path.simulated * 1e3
        ratio = None if path.simulated is None else seconds / path.simulated
        bounced = path.bounces.share()
        unequal, wrong = map(total, counts)
        yield StepRow(text, steps, path.name, simulated, seconds * 1e3, ratio, bounced, unequal, wrong)


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--tp", type=int, nargs="+", default=[1, 1], help="ranks of each stage")
    options.add_argument(
        "--preset", nargs="+", choices=PRESETS, help="default: large medium small on GPUs, tiny on the CPU"
    )
    for field in fields(Setting):
        options.add_argument(f"--{field.name.replace('_', '-')}", type=int, help="instead of the preset's")
    options.add_argument("--compression", default="none", choices=("none", "bf16", "8bit"))
    options.add_argument("--steps", type=int, default=7, help="counted steps of each path")
    given = parse(options, lambda given: sum(given.tp), edge=lambda given: given.tp[0])
    given.preset = given.preset or (["tiny"] if given.device == "cpu" else ["large", "medium", "small"])
    context = f"stages of {', '.join(map(str, given.tp))} ranks, first and last layers on stage 0"
    sys.exit(run(measure, given, context))
