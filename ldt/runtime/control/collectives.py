"""Broadcasts, gathers and sums over all ranks: between the leaders first, then within each node.

Each message crosses a slow link once, and none is forwarded through a third node.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ldt.errors import LdtError
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.health.failure_detector import FailureDetector
from ldt.topology import Node

__all__ = ["MAX_BYTES", "Collectives", "as_bytes", "as_tensor", "wait_or_fail"]

_POLL = timedelta(seconds=0.2)
_INLINE_BYTES = 2048  # a message up to this size takes one round, a longer one two
_LENGTH_BYTES = 8
MAX_BYTES = 64 << 20
_SUM = "a sum over all ranks"


def wait_or_fail(work: dist.Work, detector: FailureDetector, what: str, seconds: float | None = None) -> None:
    """Wait for a host-side work of a group, for at most ``seconds`` if given.

    Raises RemoteStageError as soon as the mesh has failed, and LdtError if the connection is lost or the time is up.
    Only for collectives: gloo lets them, but not its point-to-point works, be waited for in slices.
    """
    start = time.monotonic()
    with detector.progress.waiting(what):
        while not work.is_completed():
            try:
                work.wait(_POLL)
            except RuntimeError:  # the time slice is over, or the work has failed
                detector.watchdog.check()
                if seconds is not None and time.monotonic() - start > seconds and not work.is_completed():
                    raise LdtError(
                        f"waited {seconds:g} s for {what}: check that every rank makes the same calls; if it "
                        "only takes long, pass connect a longer transfer_timeout"
                    ) from None
        try:
            work.wait()
        except RuntimeError as error:
            raise detector.lost(f"waiting for {what}", error) from error


class Collectives:
    """Collectives of all ranks, over gloo.

    Args:
        rank_info: This rank's position in the topology.
        detector: Raises the failure of another rank while this one waits.
        seconds: The timeout of each call.
        node: The group of this rank's node; None if the node has one rank.
        leaders: The group of all leaders; None if there is one, or this rank is not a leader.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        detector: FailureDetector,
        seconds: float,
        node: dist.ProcessGroup | None,
        leaders: dist.ProcessGroup | None,
    ) -> None:
        self._rank_info = rank_info
        self._detector = detector
        self._seconds = seconds
        self._node = node
        self._leaders = leaders

    def broadcast(self, data: bytes, source: Node) -> bytes:
        """Broadcast ``data`` of the leader of ``source`` to every rank."""
        if self._leaders is not None:
            data = self._broadcast(self._leaders, self._rank_info.topology.nodes.index(source), data)
        return self.broadcast_in_node(data)

    def broadcast_in_node(self, data: bytes, *, no_timeout: bool = False) -> bytes:
        """Broadcast ``data`` of this node's leader to the ranks of the node. A collective call of these ranks only.

        With ``no_timeout`` the ranks wait for the leader indefinitely.
        """
        return data if self._node is None else self._broadcast(self._node, 0, data, no_timeout)

    def gather(self, data: bytes) -> list[bytes]:
        """Gather ``data`` of every rank, in topology order, on the first rank. Elsewhere returns none."""
        messages = self._gather_messages(self._node, [data])
        return self._gather_messages(self._leaders, messages) if self._rank_info.is_leader else []

    def all_gather(self, data: bytes) -> list[bytes]:
        """Gather ``data`` of every rank, in topology order, on every rank."""
        messages = _unpacked(self.broadcast(_packed(self.gather(data)), self._rank_info.topology.nodes[0]))
        if len(messages) != self._rank_info.topology.world_size:
            raise LdtError(f"expected {self._rank_info.topology.world_size} messages, got {len(messages)}")
        return messages

    def all_gather_in_node(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Gather ``tensor``, of one shape on all ranks of this node. A collective call of these ranks only."""
        if self._node is None:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self._node))]
        self._finish(dist.all_gather(parts, tensor, group=self._node, async_op=True), what, no_timeout=True)
        return parts

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over all ranks, on every rank."""
        if self._node is not None:
            self._finish(dist.reduce(tensor, group=self._node, group_dst=0, async_op=True), _SUM)
        if self._leaders is not None:
            parts = self._gather(self._leaders, tensor, _SUM)
            tensor = self._scatter(self._leaders, 0, torch.stack(parts).sum(0) if parts else tensor)
        if self._node is not None:
            self._finish(dist.broadcast(tensor, group=self._node, group_src=0, async_op=True), _SUM)
        return tensor

    def close(self) -> None:
        """Release the groups."""
        self._node = self._leaders = None

    # -- one group -------------------------------------------------------------------------------------------

    def _broadcast(self, group: dist.ProcessGroup, root: int, data: bytes, no_timeout: bool = False) -> bytes:
        is_root = dist.get_rank(group) == root
        frame = torch.zeros(_LENGTH_BYTES + _INLINE_BYTES, dtype=torch.uint8, device="cpu")
        if is_root:
            inline = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_INLINE_BYTES]
            frame[: len(inline)] = as_tensor(inline)
        frame = self._scatter(group, root, frame, no_timeout)
        length = int.from_bytes(as_bytes(frame[:_LENGTH_BYTES]), "little")
        if length > MAX_BYTES:
            raise LdtError(f"expected a message of at most {MAX_BYTES} bytes, got a header for {length}")
        if length <= _INLINE_BYTES:
            return as_bytes(frame[_LENGTH_BYTES : _LENGTH_BYTES + length])
        whole = as_tensor(data) if is_root else torch.empty(length, dtype=torch.uint8, device="cpu")
        return as_bytes(self._scatter(group, root, whole))

    def _gather_messages(self, group: dist.ProcessGroup | None, messages: Sequence[bytes]) -> list[bytes]:
        """Gather the messages of all ranks of ``group`` on its first rank, in order; elsewhere returns none."""
        if group is None:
            return list(messages)
        packed = _packed(messages)
        lengths = self._gather(group, torch.tensor([len(packed)], device="cpu"))
        longest = self._scatter(
            group, 0, torch.stack(lengths).max() if lengths else torch.tensor(0, device="cpu")
        )
        if not len(packed) <= int(longest) <= MAX_BYTES:
            raise LdtError(
                f"expected messages of {len(packed)} (this rank's) to {MAX_BYTES} bytes, got a header for "
                f"{int(longest)}"
            )
        padded = torch.zeros(int(longest), dtype=torch.uint8, device="cpu")
        padded[: len(packed)] = as_tensor(packed)
        parts = self._gather(group, padded)
        return [message for part in parts for message in _unpacked(as_bytes(part))]

    def _scatter(
        self, group: dist.ProcessGroup, root: int, tensor: torch.Tensor, no_timeout: bool = False
    ) -> torch.Tensor:
        """Send the root's ``tensor`` to each rank directly. A broadcast would pass through other, maybe far, ranks."""
        parts = [tensor] * dist.get_world_size(group) if dist.get_rank(group) == root else None
        received = torch.empty_like(tensor)
        sender = dist.get_global_rank(group, root)
        what = f"a message of rank {sender}" if parts is None else "other ranks to receive a message"
        self._finish(
            dist.scatter(received, parts, group=group, group_src=root, async_op=True), what, no_timeout
        )
        return received

    def _gather(
        self, group: dist.ProcessGroup, tensor: torch.Tensor, what: str = "messages of all ranks"
    ) -> list[torch.Tensor]:
        """Gather the tensors of all ranks of ``group`` on its first rank; elsewhere returns none."""
        first = dist.get_rank(group) == 0
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))] if first else None
        self._finish(dist.gather(tensor, parts, group=group, group_dst=0, async_op=True), what)
        return parts or []

    def _finish(self, work: dist.Work, what: str, no_timeout: bool = False) -> None:
        wait_or_fail(work, self._detector, what, None if no_timeout else self._seconds)


def _packed(messages: Sequence[bytes]) -> bytes:
    """The messages, each after its length."""
    return b"".join(len(message).to_bytes(_LENGTH_BYTES, "little") + message for message in messages)


def _unpacked(data: bytes) -> list[bytes]:
    """Inverse of ``_packed``; ignores padding. Raises LdtError if a message is truncated."""
    messages = []
    while len(data) >= _LENGTH_BYTES:
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        if length == 0:
            break
        if length > len(data) - _LENGTH_BYTES:
            raise LdtError(f"expected a message of {length} bytes, got {len(data) - _LENGTH_BYTES}")
        messages.append(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
        data = data[_LENGTH_BYTES + length :]
    return messages


def as_tensor(data: bytes) -> torch.Tensor:
    """``data`` as a uint8 tensor on the CPU."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous uint8 tensor on the CPU."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())
