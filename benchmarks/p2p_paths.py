"""Paths between the ranks of a pair, in both directions: torch.distributed's own calls, and lanes over each transport.

With n pairs, rank r of the lower half is paired with rank r + n. "Up" is from the lower to the upper rank. Each
direction has its own communicator, as channels have on dedicated lanes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from courier import Courier, Path, Wait
from transports import connect_each, device_of, new_group

import ldt
from ldt.runtime.comm.transfer_modes import LEADERS
from ldt.topology import Direction

__all__ = ["BothWays", "P2pPaths", "is_lower"]

Call = Callable[[torch.Tensor, int, dist.ProcessGroup], Wait]


class BothWays(NamedTuple):
    """The path this rank sends on, and the path it receives on."""

    up: Path
    down: Path

    @property
    def name(self) -> str:
        return self.up.name


def is_lower() -> bool:
    return dist.get_rank() < dist.get_world_size() // 2


class P2pPaths:
    """All paths, the baselines first. A context manager: it holds the meshes of the lanes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._device = device_of(arguments)
        topology = ldt.Topology([1, 1], dp=arguments.pairs)
        self._meshes = connect_each(topology, arguments)
        self.paths = [
            self._of_torch("isend/irecv", _isend, _irecv),
            self._of_torch("batch_isend_irecv", _batch_of(dist.isend), _batch_of(dist.irecv)),
            *(self._of_mesh(f"lane, {name}", mesh) for name, mesh in self._meshes.items()),
        ]
        for way in (way for path in self.paths for way in path):
            Courier(way, 4, self._device).connect()  # one direction after the other, on all ranks

    def __enter__(self) -> list[BothWays]:
        return self.paths

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return  # closing after a device hang would hide the error
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        for mesh in self._meshes.values():
            mesh.close()

    def _of_torch(self, name: str, send: Call, receive: Call) -> BothWays:
        pairs, rank = dist.get_world_size() // 2, dist.get_rank()
        lower = rank % pairs
        peer = rank + pairs if is_lower() else lower

        def path(group: dist.ProcessGroup, sends: bool) -> Path:
            return Path(
                name,
                (lambda source: send(source, peer, group)) if sends else None,
                None if sends else (lambda target: receive(target, peer, group)),
                lambda number: torch.empty(number, dtype=torch.int32, device=self._device),
            )

        up, down = (
            [new_group([pair, pair + pairs], self._device) for pair in range(pairs)] for _ in range(2)
        )
        return BothWays(path(up[lower], is_lower()), path(down[lower], not is_lower()))

    def _of_mesh(self, name: str, mesh: ldt.Mesh) -> BothWays:
        def path(direction: Direction) -> Path:
            end = mesh.endpoints[mesh.topology.channel(0, direction, mesh.replica)]
            lane, peer = end.stripes[LEADERS]
            assert peer is not None, "stages of one rank have leaders only"
            return Path(
                name,
                (lambda source: lane.send([source], peer).wait) if end.sends else None,
                None if end.sends else (lambda target: lane.recv([target], peer).wait),
                lambda number: lane.empty([number], torch.int32),
                receiving_lanes=[] if end.sends else [lane],
            )

        return BothWays(path("F"), path("B"))


def _isend(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup) -> Wait:
    work = dist.isend(tensor, peer, group)
    assert work is not None
    return work.wait


def _irecv(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup) -> Wait:
    work = dist.irecv(tensor, peer, group)
    assert work is not None
    return work.wait


def _batch_of(call: Callable[..., object]) -> Call:
    """Launch a batch of one message, as torch.distributed.pipelining does."""

    def start(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup) -> Wait:
        works = dist.batch_isend_irecv([dist.P2POp(call, tensor, peer, group)])
        return works[0].wait if len(works) == 1 else lambda: [work.wait() for work in works]

    return start
