"""How should a message get to all ranks of a stage: by the leader, in shares, or each rank to its peer?

Stage 0 of ``--tp`` ranks sends to stage 1 of as many, over the channels that a pipeline has. ``p50`` is from launch to
the end on the slowest rank; ``over leader`` how many times faster than that way.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from harness import parser, run, slowest

import ldt
from ldt.cli.units import nbytes
from ldt.runtime.device import synchronize_current_stream
from ldt.runtime.strands import Transfer


@dataclass(frozen=True)
class TransferRow:
    """One way at one size."""

    COLUMNS: ClassVar[Mapping[str, str]] = {
        "bytes": ">12",
        "tp": ">4",
        "transfer": "<10",
        "p50 µs": ">10.1f",
        "GB/s": ">8.2f",
        "over leader": ">12.2f",
        "wrong": ">6",
    }
    bytes: int
    tp: int
    transfer: str
    p50: float
    gigabytes_per_second: float
    over_leader: float
    wrong: int


def measure(arguments: argparse.Namespace) -> list[TransferRow]:
    topology = ldt.Topology([arguments.tp] * 2)
    device = torch.device("cuda", dist.get_rank()) if arguments.backend == "nccl" else torch.device("cpu")
    ways: tuple[Transfer, ...] = ("leader", "scatter", "direct")
    meshes = {way: ldt.connect(topology, arguments.backend, transfer=way, device=device) for way in ways}
    rows = []
    for size in arguments.sizes:
        truth = torch.arange(size // 4, dtype=torch.int32, device=device)
        wrong: dict[str, int] = {way: one(mesh, truth)[1] for way, mesh in meshes.items()}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.count):  # ways take turns
            for way, mesh in meshes.items():
                times[way].append(one(mesh, truth)[0])
        medians = {name: statistics.median(slowest(values)) for name, values in times.items()}
        for name, median in medians.items():
            total = torch.tensor(wrong[name])
            dist.all_reduce(total)
            figures = median * 1e6, size / median / 1e9, medians["leader"] / median
            rows.append(TransferRow(size, arguments.tp, name, *figures, int(total)))
    for mesh in meshes.values():
        mesh.close()
    return rows


def one(mesh: ldt.Mesh, truth: torch.Tensor) -> tuple[float, int]:
    """Seconds, and wrong elements on this rank."""
    end = mesh.endpoints.get(mesh.topology.channel(0, "F", 0))
    sends = mesh.stage == 0
    buffer = truth if sends else torch.zeros_like(truth)
    synchronize_current_stream(mesh.device)
    dist.all_reduce(torch.zeros(1))
    start = time.perf_counter()
    if end is not None:
        work = end.send([buffer], "") if sends else end.receive([buffer], "")
        if work is not None:
            work.wait()
    synchronize_current_stream(mesh.device)
    seconds = time.perf_counter() - start
    return seconds, 0 if sends else int((buffer != truth).sum())


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0])
    sizes = [1 << 16, 1 << 20, 16 << 20, 64 << 20]
    options.add_argument("--sizes", type=nbytes, nargs="+", default=sizes, help="per message: 64KiB, 256MiB")
    options.add_argument("--count", type=int, default=20, help="messages per row")
    options.add_argument("--tp", type=int, default=2, help="ranks of each stage")
    options.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    given = options.parse_args()
    context = f"two stages of {given.tp} ranks each"
    sys.exit(run(2 * given.tp, measure, TransferRow, given, context, backend=given.backend))
