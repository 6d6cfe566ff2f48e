"""The endpoints of a lane on the test device: rank 0 sends, rank 1 receives and broadcasts, rank 2 is its member."""

from __future__ import annotations

from collections.abc import Sequence

import npu
import torch
import torch.distributed as dist

import ldt
from ldt._C import Lane
from ldt.runtime.comm.endpoint import Endpoint
from ldt.runtime.comm.transfer_modes import CompositeWork

SENDER, LEADER, MEMBER = 0, 1, 2
Message = list[torch.Tensor]


def fused_lane(device: torch.device, *, chunk_bytes: int = 1 << 20) -> Lane:
    """Every rank of the world calls it."""
    p2p, stage = npu.hccl_group(SENDER, LEADER), npu.hccl_group(LEADER, MEMBER)
    rank = dist.get_rank()
    return Lane(
        "fused",
        p2p=None if rank == MEMBER else p2p,
        stage=None if rank == SENDER else stage,
        device=device,
        chunk_bytes=chunk_bytes,
        timeout=20.0,
    )


def is_sender() -> bool:
    return dist.get_rank() == SENDER


def launch(lane: Lane, message: Sequence[torch.Tensor]) -> tuple[dist.Work, Message]:
    """Send ``message`` on the sender, receive one like it elsewhere. Returns the work and the received tensors."""
    if is_sender():
        return lane.send(list(message), LEADER), list(message)
    targets = [lane.empty(tensor.shape, tensor.dtype) for tensor in message]
    return lane.recv(targets, SENDER), targets


def assert_all(checks: Sequence[torch.Tensor]) -> None:
    """Checks that stay on the device: reading each at once would keep the streams from running late."""
    values = torch.stack(list(checks)).tolist()
    wrong = [index for index, value in enumerate(values) if not value]
    assert not wrong, f"wrong data in {len(wrong)} of {len(values)} rounds, the first in round {wrong[0]}"


def forward_end(mesh: ldt.Mesh) -> Endpoint | None:
    """This rank's endpoint of the hop from stage 0 to stage 1."""
    return mesh.endpoints.get(mesh.topology.channel(0, "F", 0))


def send(end: Endpoint, tensor: torch.Tensor, label: str = "data") -> CompositeWork:
    work = end.send([tensor], label)
    assert work is not None
    return work


def sized(device: torch.device, nbytes: int, value: int) -> torch.Tensor:
    """Data that differ from every other message at every position."""
    return (torch.arange(nbytes // 4, dtype=torch.int32, device=device) + 7919 * value)[: nbytes // 4]
