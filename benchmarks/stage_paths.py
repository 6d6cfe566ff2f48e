"""Paths from rank 0 to all ranks of a stage that rank 1 leads: by hand, and fused in a lane over each transport.

The stage is ranks 1 to n. NCCL takes one rank for each GPU, so on two GPUs it is ranks 0 and 1: rank 0 is the source
and also the member that hears the broadcast.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from courier import Path, Wait
from transports import connect_each, device_of, new_group, note, transports_of

import ldt
from ldt._C import Lane
from ldt.runtime.strands import LEADERS

__all__ = ["stage_paths", "two_rank_lanes"]

SOURCE, LEADER = 0, 1


@contextmanager
def stage_paths(arguments: argparse.Namespace) -> Iterator[list[Path]]:
    """The bare receive, which leaves members out, then the hand-made way, then lanes."""
    device = device_of(arguments)
    stage = [SOURCE, LEADER] if arguments.two_ranks else list(range(LEADER, arguments.ranks))
    paths = [_of_torch("receive alone", [LEADER], device), _of_torch("hand-made", stage, device)]
    meshes: Mapping[str, ldt.Mesh] = {}
    lanes: list[Lane] = []
    if arguments.two_ranks:
        for transport in transports_of(arguments):
            try:
                made = two_rank_lanes(transport, device)
            except ValueError as error:
                note(f"{transport} is left out: {error}")
                continue
            lanes += made
            paths.append(_of_lanes(f"fused, {transport}", made, device))
    else:
        topology = ldt.Topology([1, arguments.stage])
        meshes = connect_each(topology, arguments)
        paths += [_of_mesh(f"fused, {name}", mesh) for name, mesh in meshes.items()]
    for chunk in arguments.chunk_bytes or []:
        made = lanes_by_hand(stage, device, chunk)
        lanes += made
        paths.append(_of_lanes(f"fused, {chunk >> 10} KiB", made, device))
    yield paths
    if device.type == "cuda":
        torch.cuda.synchronize()
    for lane in lanes:
        lane.close()
    for mesh in meshes.values():
        mesh.close()


def two_rank_lanes(transport: str, device: torch.device) -> list[Lane]:
    """What ``lanes_by_hand`` gives for ranks 0 and 1 as the stage. Raises ValueError where there is no such lane."""
    if transport != "c10d":
        raise ValueError(
            f"lanes over {transport!r} cannot be made with two ranks of which one is both source and member: "
            "expected 'c10d'; take three GPUs for the others"
        )
    return lanes_by_hand([SOURCE, LEADER], device)


def lanes_by_hand(stage: list[int], device: torch.device, chunk_bytes: int | None = None) -> list[Lane]:
    """Over process groups: on the source the lane that it sends on, then on a rank of the stage that it hears on."""
    p2p, members = (new_group(ranks, device) for ranks in ([SOURCE, LEADER], stage))
    rank, root = dist.get_rank(), sorted(stage).index(LEADER)
    lanes = []
    if rank == SOURCE:
        lanes.append(
            Lane("sends", p2p=p2p, stage=None, device=device, chunk_bytes=chunk_bytes, announce=False)
        )
    if rank in stage:
        group = p2p if rank == LEADER else None
        lanes.append(
            Lane(
                "hears",
                p2p=group,
                stage=members,
                stage_root=root,
                device=device,
                chunk_bytes=chunk_bytes,
                announce=False,
            )
        )
    return lanes


def _of_lanes(name: str, lanes: list[Lane], device: torch.device) -> Path:
    sends = dist.get_rank() == SOURCE
    outgoing, incoming = lanes[:sends], lanes[sends:]

    def start(source: torch.Tensor, target: torch.Tensor) -> Wait:
        works = [lane.send([source], LEADER) for lane in outgoing]
        works += [lane.recv([target], SOURCE) for lane in incoming]
        return lambda: [work.wait() for work in works]

    return Path(name, sends, bool(incoming), start, lambda number: lanes[-1].empty([number], torch.int32))


def _of_mesh(name: str, mesh: ldt.Mesh) -> Path:
    end = mesh.endpoints[mesh.topology.channel(0, "F", 0)]
    lane, peer = end.strands[LEADERS]

    def start(source: torch.Tensor, target: torch.Tensor) -> Wait:
        if not end.sends:
            return lane.recv([target], peer).wait
        assert peer is not None, "the source has a peer"
        return lane.send([source], peer).wait

    return Path(name, end.sends, not end.sends, start, lambda number: lane.empty([number], torch.int32))


def _of_torch(name: str, stage: list[int], device: torch.device) -> Path:
    """isend and irecv, and in the wait a broadcast in the stage, as code without lanes does it."""
    p2p, members = (new_group(ranks, device) for ranks in ([SOURCE, LEADER], stage))
    rank = dist.get_rank()

    def start(source: torch.Tensor, target: torch.Tensor) -> Wait:
        work: dist.Work | None = None
        if rank == SOURCE:
            work = dist.isend(source, LEADER, p2p)
        elif rank == LEADER:
            work = dist.irecv(target, SOURCE, p2p)

        def wait() -> None:
            if work is not None:
                work.wait()
            if rank in stage and len(stage) > 1:
                dist.broadcast(target, LEADER, members)

        return wait

    return Path(
        name,
        rank == SOURCE,
        rank in stage,
        start,
        lambda number: torch.empty(number, dtype=torch.int32, device=device),
    )
