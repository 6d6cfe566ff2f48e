"""A fused lane on two ranks, for machines with two GPUs and backends that allow one rank per GPU.

A fused receive has a sender, a leader and a member. Here rank 0 is both the sender and the member: rank 1, the leader,
receives each message from it and broadcasts it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ldt._C import (
    CopyEngineLinks,
    IpcPool,
    IpcReceiver,
    IpcSender,
    IsolatedStream,
    Lane,
    LaneError,
    NcclCommunicators,
)
from ldt._torch_private import nccl_communicator

__all__ = ["LEADER", "SENDER", "FusedPair"]

SENDER, LEADER = 0, 1
Made = TypeVar("Made")


class FusedPair:
    """This rank's lanes: ``sender`` on rank 0, and ``receiver``: the leader's on rank 1, the member's on rank 0."""

    def __init__(
        self, device: torch.device, transport: str = "c10d", *, backend: str = "nccl", **options: Any
    ) -> None:
        self.rank, self.device = dist.get_rank(), device
        self.sender: Lane | None = None
        groups = [dist.new_group([SENDER, LEADER], backend=backend) for _ in range(2)]
        to_leader, to_member = _TRANSPORTS[transport](device, *groups)
        self._groups = p2p, stage = groups
        options["device"] = device
        if self.rank == SENDER:
            self.sender = Lane("sender", p2p=p2p, stage=None, transport=to_leader, **options)
            self.receiver = Lane(
                "receiver", p2p=None, stage=stage, stage_root=LEADER, transport=to_member, **options
            )
        else:
            self.receiver = Lane(
                "receiver", p2p=p2p, stage=stage, stage_root=LEADER, transport=to_leader, **options
            )

    def launch(self, message: Sequence[torch.Tensor]) -> tuple[list[dist.Work], list[torch.Tensor]]:
        """Send ``message`` from rank 0. Returns this rank's works and the received tensors."""
        works = [] if self.sender is None else [self.sender.send(message, LEADER)]
        targets = self.receiver.buffers(
            [tensor.shape for tensor in message], [tensor.dtype for tensor in message]
        )
        return [*works, self.receiver.recv(targets, SENDER)], targets

    def lanes(self) -> list[Lane]:
        return [self.receiver] if self.sender is None else [self.sender, self.receiver]

    def close(self) -> None:
        for lane in self.lanes():
            lane.close()
        for group in self._groups:
            dist.destroy_process_group(group)


# Of the lane from sender to leader and, on rank 0, of the lane that receives the broadcast.
Transports = tuple[Any, Any]


def _of_groups(device: torch.device, p2p: dist.ProcessGroup, stage: dist.ProcessGroup) -> Transports:
    return None, None


def _of_nccl(device: torch.device, p2p: dist.ProcessGroup, stage: dist.ProcessGroup) -> Transports:
    ends = [nccl_communicator(group, device) for group in (p2p, stage)]
    if dist.get_rank() == SENDER:
        return NcclCommunicators(p2p=ends[0], stage=None), NcclCommunicators(p2p=None, stage=ends[1])
    return NcclCommunicators(p2p=ends[0], stage=ends[1]), None


def _of_copy_engine(device: torch.device, p2p: dist.ProcessGroup, stage: dist.ProcessGroup) -> Transports:
    me = dist.get_rank()
    exchange = dist.new_group([SENDER, LEADER], backend="gloo")
    memory, receiver, offer = _all_or_none(exchange, lambda: _receiving_end(device))
    offers: list[str] = [""] * 2
    dist.all_gather_object(offers, offer, group=exchange)
    mine = memory if me == LEADER else None
    sender = _all_or_none(exchange, lambda: IpcSender(device, offers[1 - me], mine))

    def links(**ends: Any) -> CopyEngineLinks:
        none: dict[str, Any] = {
            "stream": IsolatedStream(device),
            "memory": None,
            "senders": {},
            "receivers": {},
            "from_stage": None,
            "to_stage": None,
        }
        return CopyEngineLinks(**{**none, **ends})

    if me == SENDER:
        return links(senders={LEADER: sender}), links(memory=memory, from_stage=receiver)
    return links(memory=memory, receivers={SENDER: receiver}, to_stage=sender), None


def _receiving_end(device: torch.device) -> tuple[IpcPool, IpcReceiver, str]:
    memory = IpcPool(device)
    receiver = IpcReceiver(memory)
    return memory, receiver, receiver.offer()


def _all_or_none(group: dist.ProcessGroup, make: Callable[[], Made]) -> Made:
    """Return ``make()``. Raises LaneError on both ranks if it does on one, so that neither waits for the other."""
    made: Made | None = None
    texts: list[str] = [""] * 2
    refusal = ""
    try:
        made = make()
    except LaneError as error:
        refusal = f"rank {dist.get_rank()}: {error}"
    dist.all_gather_object(texts, refusal, group=group)
    if any(texts):
        raise LaneError("; ".join(filter(None, texts)))
    assert made is not None
    return made


_TRANSPORTS: Mapping[str, Callable[[torch.device, dist.ProcessGroup, dist.ProcessGroup], Transports]] = {
    "c10d": _of_groups,
    "nccl": _of_nccl,
    "copy_engine": _of_copy_engine,
}
