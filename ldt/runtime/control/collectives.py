"""Bytes and sums between all ranks of a mesh: straight from leader to leader, and on within the nodes.

So each slow link is crossed once, and no message passes through a node that it only wants to get past.
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
_A_SUM = "a sum over all ranks"


def wait_or_fail(work: dist.Work, detector: FailureDetector, what: str, seconds: float | None = None) -> None:
    """Wait for a host-side work of a group, as long as it takes unless ``seconds`` are given.

    Raises RemoteStageError as soon as the mesh has failed, LdtError when the connection is lost or the time is up.
    gloo's collectives may be waited for in slices; its point-to-point works may not.
    """
    start = time.monotonic()
    with detector.progress.waiting(what):
        while not work.is_completed():
            try:
                work.wait(_POLL)
            except RuntimeError:  # the slice is over, or the work has failed
                detector.watchdog.check()
                if seconds is not None and time.monotonic() - start > seconds and not work.is_completed():
                    raise LdtError(
                        f"waited {seconds:g} s for {what}: is every rank making the same calls? If so, and it only "
                        "takes long, give connect a longer transfer_timeout"
                    ) from None
        try:
            work.wait()
        except RuntimeError as error:
            raise detector.lost(f"waiting for {what}", error) from error


class Collectives:
    """Collective calls of all ranks, on gloo. ``node`` is the group of this rank's node, ``leaders`` that of leaders.

    Either is None where it would have one rank, or none of this node's. Within ``seconds`` each call must be done.
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
        """The bytes that the leader of ``source`` gives, on every rank."""
        if self._leaders is not None:
            data = self._from_root(self._leaders, self._rank_info.topology.nodes.index(source), data)
        return self.broadcast_in_node(data)

    def broadcast_in_node(self, data: bytes, *, patient: bool = False) -> bytes:
        """The bytes that the leader of this node gives, on each of its ranks. A collective call of these alone.

        ``patient`` waits for the leader without a limit.
        """
        return data if self._node is None else self._from_root(self._node, 0, data, patient)

    def all_gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, by rank of the topology, on every rank."""
        of_node = self._to_root(self._node, [data])
        of_all = self._to_root(self._leaders, of_node) if self._rank_info.is_leader else []
        messages = _unpacked(self.broadcast(_packed(of_all), self._rank_info.topology.nodes[0]))
        if len(messages) != self._rank_info.topology.world_size:
            raise LdtError(f"{len(messages)} messages came of {self._rank_info.topology.world_size} ranks")
        return messages

    def all_gather_in_node(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """``tensor`` of each rank of this node, on all of these alone, which have it in one shape."""
        if self._node is None:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self._node))]
        self._finish(dist.all_gather(parts, tensor, group=self._node, async_op=True), what, patient=True)
        return parts

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on every rank."""
        if self._node is not None:
            self._finish(dist.reduce(tensor, group=self._node, group_dst=0, async_op=True), _A_SUM)
        if self._leaders is not None:
            parts = self._gathered(self._leaders, tensor, _A_SUM)
            tensor = self._scattered(self._leaders, 0, torch.stack(parts).sum(0) if parts else tensor)
        if self._node is not None:
            self._finish(dist.broadcast(tensor, group=self._node, group_src=0, async_op=True), _A_SUM)
        return tensor

    def close(self) -> None:
        """Let go of the groups."""
        self._node = self._leaders = None

    # -- one group -------------------------------------------------------------------------------------------

    def _from_root(self, group: dist.ProcessGroup, root: int, data: bytes, patient: bool = False) -> bytes:
        mine = dist.get_rank(group) == root
        frame = torch.zeros(_LENGTH_BYTES + _INLINE_BYTES, dtype=torch.uint8, device="cpu")
        if mine:
            inline = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_INLINE_BYTES]
            frame[: len(inline)] = as_tensor(inline)
        frame = self._scattered(group, root, frame, patient)
        length = int.from_bytes(as_bytes(frame[:_LENGTH_BYTES]), "little")
        if length > MAX_BYTES:
            raise LdtError(f"a message of {length} bytes was announced; at most {MAX_BYTES} are accepted")
        if length <= _INLINE_BYTES:
            return as_bytes(frame[_LENGTH_BYTES : _LENGTH_BYTES + length])
        whole = as_tensor(data) if mine else torch.empty(length, dtype=torch.uint8, device="cpu")
        return as_bytes(self._scattered(group, root, whole))

    def _to_root(self, group: dist.ProcessGroup | None, messages: Sequence[bytes]) -> list[bytes]:
        """On the first rank of ``group`` the messages of all its ranks, in order; elsewhere none."""
        if group is None:
            return list(messages)
        mine = _packed(messages)
        lengths = self._gathered(group, torch.tensor([len(mine)], device="cpu"))
        longest = self._scattered(
            group, 0, torch.stack(lengths).max() if lengths else torch.tensor(0, device="cpu")
        )
        if not len(mine) <= int(longest) <= MAX_BYTES:
            raise LdtError(
                f"messages of {int(longest)} bytes were announced, this rank's has {len(mine)}; at most {MAX_BYTES} "
                "are accepted"
            )
        padded = torch.zeros(int(longest), dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = as_tensor(mine)
        parts = self._gathered(group, padded)
        return [message for part in parts for message in _unpacked(as_bytes(part))]

    def _scattered(
        self, group: dist.ProcessGroup, root: int, tensor: torch.Tensor, patient: bool = False
    ) -> torch.Tensor:
        """``tensor`` of the root, which sends to each itself: a broadcast would pass through others, maybe far away."""
        parts = [tensor] * dist.get_world_size(group) if dist.get_rank(group) == root else None
        received = torch.empty_like(tensor)
        who = dist.get_global_rank(group, root)
        what = f"a message of rank {who}" if parts is None else "the others to take a message"
        self._finish(dist.scatter(received, parts, group=group, group_src=root, async_op=True), what, patient)
        return received

    def _gathered(
        self, group: dist.ProcessGroup, tensor: torch.Tensor, what: str = "messages of all ranks"
    ) -> list[torch.Tensor]:
        """The tensors of all ranks of ``group`` on its first, elsewhere none."""
        first = dist.get_rank(group) == 0
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))] if first else None
        self._finish(dist.gather(tensor, parts, group=group, group_dst=0, async_op=True), what)
        return parts or []

    def _finish(self, work: dist.Work, what: str, patient: bool = False) -> None:
        wait_or_fail(work, self._detector, what, None if patient else self._seconds)


def _packed(messages: Sequence[bytes]) -> bytes:
    """Each with its length before it."""
    return b"".join(len(message).to_bytes(_LENGTH_BYTES, "little") + message for message in messages)


def _unpacked(data: bytes) -> list[bytes]:
    """What was packed, without the padding behind it. Raises LdtError if a message is cut off."""
    messages = []
    while len(data) >= _LENGTH_BYTES:
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        if length == 0:
            break
        if length > len(data) - _LENGTH_BYTES:
            raise LdtError(f"a message of {length} bytes was announced, {len(data) - _LENGTH_BYTES} came")
        messages.append(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
        data = data[_LENGTH_BYTES + length :]
    return messages


def as_tensor(data: bytes) -> torch.Tensor:
    """uint8 on the CPU."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """What a contiguous uint8 tensor on the CPU holds."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())
