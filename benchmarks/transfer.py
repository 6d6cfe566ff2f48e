"""How should a message reach all ranks of a stage: through the leader, in shares, or from each rank to its peer?

Stage 0 of ``--tp`` ranks sends to stage 1 of as many, over a pipeline's channels on each transport, into posted memory.
``p50`` runs from the first rank's send to the end on the last rank. ``over leader`` is the speedup over that mode on
the same transport, ``bounced`` the share of messages that did not go directly into that memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from clock import Passage, durations, high
from courier import Courier, Path, Wait
from harness import Row, column, parse, parser, run
from picture import Picture
from transports import connect_or_note, transports_of

import ldt
from ldt.cli.units import nbytes
from ldt.runtime.comm.transfer_modes import Transfer
from ldt.runtime.common.tensor_spec import TensorSpec

WAYS = [way for way in get_args(Transfer) if way != "auto"]
SIZES = {"cuda": [1 << 20, 16 << 20, 64 << 20, 256 << 20], "cpu": [64 << 10, 1 << 20, 16 << 20, 64 << 20]}


@dataclass(frozen=True)
class TransferRow:
    """One mode over one transport at one size."""

    PICTURE: ClassVar[Picture] = Picture("size", ("p50",), ("transport", "way"))
    size: int = column("size", ">12")
    tp: int = column("tp", ">4")
    count: int = column("count", ">6")
    transport: str = column("transport", "<12")
    way: str = column("transfer", "<10")
    p50: float = column("p50 µs", ">10.1f")
    p99: float = column("p99 µs", ">10.1f")
    gigabytes_per_second: float = column("GB/s", ">8.2f")
    over_leader: float | None = column("over leader", ">12.2f")
    bounced: float | None = column("bounced", ">8.0%")
    wrong: int = column("#wrong", ">7")


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure one transport after the other: meshes of all of them would need too many communicators."""
    topology = ldt.Topology([arguments.tp] * 2)
    for transport in transports_of(arguments):
        found = {way: connect_or_note(topology, transport, arguments, transfer=way) for way in WAYS}
        meshes = {way: mesh for way, mesh in found.items() if mesh is not None}
        for size in arguments.sizes or SIZES[arguments.device]:
            yield from rows_of(transport, meshes, size, arguments)
        for mesh in meshes.values():
            mesh.close()


def rows_of(
    transport: str, meshes: Mapping[str, ldt.Mesh], size: int, arguments: argparse.Namespace
) -> Iterator[TransferRow]:
    couriers = {way: Courier(path_over(mesh), size, mesh.device) for way, mesh in meshes.items()}
    passages: dict[str, list[Passage]] = {way: [] for way in couriers}
    for _ in range(arguments.count + 1):  # modes alternate
        for way, courier in couriers.items():
            passages[way].append(courier.carry())
    took = {way: durations(found[1:]) for way, found in passages.items()}
    for way, courier in couriers.items():
        median = statistics.median(took[way])
        yield TransferRow(
            size=size,
            tp=arguments.tp,
            count=arguments.count,
            transport=transport,
            way=way,
            p50=median * 1e6,
            p99=high(took[way]) * 1e6,
            gigabytes_per_second=size / median / 1e9,
            over_leader=statistics.median(took["leader"]) / median if "leader" in took else None,
            bounced=courier.bounced(),
            wrong=courier.wrong(),
        )


def path_over(mesh: ldt.Mesh) -> Path:
    """From stage 0 to stage 1. Ranks of stage 0 that own no stripe take no part."""
    end = mesh.endpoints.get(mesh.topology.channel(0, "F", 0))
    if end is None:
        return Path("", None, None, lambda _: torch.empty(0))

    def send(source: torch.Tensor) -> Wait:
        work = end.send([source], "")
        return work.wait if work is not None else lambda: None

    def empty(number: int) -> torch.Tensor:
        spec = TensorSpec((number,), torch.int32)
        if end.is_in_pieces([spec], [spec.shape]):
            return torch.empty(number, dtype=torch.int32, device=mesh.device)
        return end.lane.buffers([[number]], [torch.int32])[0]

    if end.sends:
        return Path("", send, None, empty)
    lanes = [stripe_end.lane for stripe_end in end.stripes.values()]
    return Path("", None, lambda target: end.receive([target], "").wait, empty, receiving_lanes=lanes)


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--sizes", type=nbytes, nargs="+", help="per message: 64KiB, 256MiB")
    options.add_argument("--count", type=int, default=20, help="messages for each row")
    options.add_argument("--tp", type=int, default=2, help="ranks of each stage")
    given = parse(options, lambda given: 2 * given.tp, edge=lambda given: given.tp)
    # "scatter" needs eight lanes per rank, and a GPU has eight queues by default.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    sys.exit(run(measure, given, f"two stages of {given.tp} ranks each"))
