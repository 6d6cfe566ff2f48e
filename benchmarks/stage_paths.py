"""Paths from rank 0 to all ranks of a stage led by rank 1: by hand, and fused in a lane over each transport.

The stage is ranks 1 to n. NCCL allows one rank per GPU, so on two GPUs the stage is ranks 0 and 1: rank 0 is the
source and also the member that receives the broadcast.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from courier import Courier, Path, Wait
from transports import connect_each, device_of, made_or_noted, new_group, transports_of

import ldt
from ldt.runtime.comm.transfer_modes import LEADERS
from ldt.testing.fused_pair import LEADER, SENDER, FusedPair

__all__ = ["stage_paths"]


@contextmanager
def stage_paths(arguments: argparse.Namespace) -> Iterator[list[Path]]:
    """Yield the bare receive, which leaves members out, then the hand-made path, then lanes, all connected."""
    device = device_of(arguments)
    stage = [SENDER, LEADER] if arguments.two_ranks else list(range(LEADER, arguments.ranks))
    paths = [_of_torch("receive alone", [LEADER], device), _of_torch("hand-made", stage, device)]
    with ExitStack() as closing:
        if arguments.two_ranks:
            for name, pair in _pairs(arguments, device):
                paths.append(_of_pair(f"fused, {name}", pair))
                closing.callback(pair.close)
        else:
            meshes = connect_each(ldt.Topology([1, arguments.stage]), arguments)
            for name, mesh in meshes.items():
                paths.append(_of_mesh(f"fused, {name}", mesh))
                closing.callback(mesh.close)
        for path in paths:
            Courier(path, 4, device).connect()
        try:
            yield paths
        except BaseException:
            closing.pop_all()  # closing after a device hang would hide the error
            raise
        if device.type == "cuda":
            torch.cuda.synchronize()


def _pairs(arguments: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, FusedPair]]:
    """Yield lanes over each transport, with pieces of the default size, then of each given size."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    for transport in transports_of(arguments):
        for chunk in [None, *(arguments.chunk_bytes or [])]:
            pair = made_or_noted(
                lambda transport=transport, chunk=chunk: FusedPair(  # type: ignore[misc]
                    device, transport, backend=backend, chunk_bytes=chunk
                ),
                transport,
                arguments,
            )
            if pair is not None:
                yield transport if chunk is None else f"{transport}, {chunk >> 10} KiB", pair


def _of_pair(name: str, pair: FusedPair) -> Path:
    sender, receiver = pair.sender, pair.receiver
    return Path(
        name,
        None if sender is None else (lambda source: sender.send([source], LEADER).wait),
        lambda target: receiver.recv([target], SENDER).wait,
        lambda number: receiver.empty([number], torch.int32),
        receiving_lanes=[receiver],
    )


def _of_mesh(name: str, mesh: ldt.Mesh) -> Path:
    end = mesh.endpoints[mesh.topology.channel(0, "F", 0)]
    lane, peer = end.stripes[LEADERS]

    def send(source: torch.Tensor) -> Wait:
        assert peer is not None, "the source has a peer"
        return lane.send([source], peer).wait

    return Path(
        name,
        send if end.sends else None,
        None if end.sends else (lambda target: lane.recv([target], peer).wait),
        lambda number: lane.empty([number], torch.int32),
        receiving_lanes=[] if end.sends else [lane],
    )


def _of_torch(name: str, stage: list[int], device: torch.device) -> Path:
    """Use isend and irecv, with a broadcast in the wait of the stage's ranks, as code without lanes does."""
    p2p, members = (new_group(ranks, device) for ranks in ([SENDER, LEADER], stage))
    rank = dist.get_rank()

    def send(source: torch.Tensor) -> Wait:
        work = dist.isend(source, LEADER, p2p)
        assert work is not None
        return work.wait

    def receive(target: torch.Tensor) -> Wait:
        work = dist.irecv(target, SENDER, p2p) if rank == LEADER else None

        def wait() -> None:
            if work is not None:
                work.wait()
            if len(stage) > 1:
                dist.broadcast(target, LEADER, members)

        return wait

    return Path(
        name,
        send if rank == SENDER else None,
        receive if rank in stage else None,
        lambda number: torch.empty(number, dtype=torch.int32, device=device),
    )
