"""The control plane: metadata as JSON between all ranks of a mesh, apart from the lanes and their payloads."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ldt.errors import LdtError
from ldt.runtime.failure import FailureWatch

__all__ = ["ControlPlane", "Pending", "wait_or_fail"]

_POLL = timedelta(seconds=0.2)
_INLINE_BYTES = 2048  # a message up to this size takes one broadcast, a longer one two
_MAX_BYTES = 64 << 20
_LENGTH_BYTES = 8


def wait_or_fail(work: dist.Work, failures: FailureWatch, what: str, seconds: float | None = None) -> None:
    """Wait for a host-side work of a group, as long as it takes unless ``seconds`` are given.

    Raises RemoteStageError as soon as the mesh has failed, LdtError when the connection is lost or the time is up.
    gloo's collectives may be waited for in slices; its point-to-point works may not.
    """
    start = time.monotonic()
    while not work.is_completed():
        try:
            work.wait(_POLL)
        except RuntimeError:  # the slice is over, or the work has failed
            failures.check()
            if seconds is not None and time.monotonic() - start > seconds and not work.is_completed():
                raise LdtError(
                    f"waited {seconds:g} s for {what}: is every rank making the same calls?"
                ) from None
    try:
        work.wait()
    except RuntimeError as error:
        failures.wait(2.0)  # a rank that goes says why before it cuts its connections
        failures.check()
        raise LdtError(f"lost the connection while waiting for {what}: {error}") from error


class Pending:
    """A sum over all ranks that was started and not yet waited for."""

    def __init__(
        self, work: dist.Work | None, read: Callable[[], list[float]], failures: FailureWatch, seconds: float
    ) -> None:
        self._work = work
        self._read = read
        self._failures = failures
        self._seconds = seconds

    def wait(self) -> list[float]:
        if self._work is not None:
            wait_or_fail(self._work, self._failures, "a sum over all ranks", self._seconds)
            self._work = None
        return self._read()


class ControlPlane:
    """Collective calls on a gloo group of all ranks; every rank makes the same ones in the same order.

    Messages are JSON, length-checked, never unpickled. ``rank`` is this rank's number in the topology and in the
    group, ``ranks[rank]`` the global one, which texts name. Without a group (one rank) nothing is sent. ``call`` names
    the call that a rank is in; it travels with each message, so that none is taken for one of another call. ``node`` is
    the group of this node, whose first rank is its leader, ``leaders`` that of all nodes' leaders, on those.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        ranks: Sequence[int],
        failures: FailureWatch,
        seconds: float,
        call: Callable[[], str] = lambda: "",
        node: dist.ProcessGroup | None = None,
        leaders: dist.ProcessGroup | None = None,
    ) -> None:
        self._call = call
        self._node = node
        self._leaders = leaders
        self._group = group
        self._rank = rank
        self._ranks = ranks
        self._failures = failures
        self._seconds = seconds

    def broadcast(self, message: Any, source: int, *, patient: bool = False) -> Any:
        """What ``source``, a rank of the topology, gives as ``message``, on every rank.

        ``patient`` waits for it without a limit.
        """
        if self._group is None:
            return message
        limit = None if patient else self._seconds
        data = _encode([self._call(), message]) if self._rank == source else b""
        buffer = torch.zeros(_LENGTH_BYTES + _INLINE_BYTES, dtype=torch.uint8)
        if self._rank == source:
            buffer[:_LENGTH_BYTES] = _as_tensor(len(data).to_bytes(_LENGTH_BYTES, "little"))
            if 0 < len(data) <= _INLINE_BYTES:
                buffer[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = _as_tensor(data)
        self._broadcast(buffer, source, limit)
        length = int.from_bytes(_as_bytes(buffer[:_LENGTH_BYTES]), "little")
        if length > _MAX_BYTES:
            raise LdtError(
                f"rank {self._ranks[source]} announced a message of {length} bytes; at most {_MAX_BYTES} are accepted"
            )
        payload = buffer[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if length > _INLINE_BYTES:
            payload = _as_tensor(data) if self._rank == source else torch.empty(length, dtype=torch.uint8)
            self._broadcast(payload, source, self._seconds)
        return self._opened(_decode(_as_bytes(payload), self._ranks[source]), source)

    def gather(self, message: Any) -> list[Any]:
        """Every rank's ``message``, by rank of the topology, on every rank."""
        return [self.broadcast(message, source) for source in range(len(self._ranks))]

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks, in double precision.

        Within each node, then from leader to leader, once there and once back, then within each node again.
        """
        tensor = self._marked(values)
        what = "a sum over all ranks"
        if self._node is not None:
            self._finish(dist.reduce(tensor, group=self._node, group_dst=0, async_op=True), what)
        if self._leaders is not None:
            first = dist.get_rank(self._leaders) == 0
            all_of_them = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self._leaders))]
            parts = all_of_them if first else None
            self._finish(dist.gather(tensor, parts, group=self._leaders, group_dst=0, async_op=True), what)
            tensor = torch.stack(all_of_them).sum(0) if first else tensor
            self._finish(dist.broadcast(tensor, group=self._leaders, group_src=0, async_op=True), what)
        if self._node is not None:
            self._finish(dist.broadcast(tensor, group=self._node, group_src=0, async_op=True), what)
        return self._unmarked(tensor)

    def start_sum(self, values: Sequence[float]) -> Pending:
        """As ``sum``, without waiting, and over all ranks in one.

        No other call of this plane may come before the result's ``wait``.
        """
        tensor = self._marked(values)
        work = None
        if self._group is not None:
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return Pending(work, lambda: self._unmarked(tensor), self._failures, self._seconds)

    def close(self) -> None:
        """Let go of the groups."""
        self._group = self._node = self._leaders = None

    def _marked(self, values: Sequence[float]) -> torch.Tensor:
        """With a number for the call that this rank is in: the sum tells whether all were in the same."""
        return torch.tensor([*values, self._mark()], dtype=torch.float64)

    def _unmarked(self, sums: torch.Tensor) -> list[float]:
        *values, mark = map(float, sums)
        if mark != len(self._ranks) * self._mark():
            self._failures.wait(1.0)
            self._failures.check()
            raise LdtError(
                f"rank {self._ranks[self._rank]} is in {self._call() or 'no call'}, another one in another call that "
                "makes a sum: every rank must make the same calls in the same order"
            )
        return values

    def _mark(self) -> float:
        """Sums of as many as there are ranks are exact."""
        return float(zlib.crc32(self._call().encode()))

    def _finish(self, work: dist.Work, what: str) -> None:
        wait_or_fail(work, self._failures, what, self._seconds)

    def _opened(self, envelope: Any, source: int) -> Any:
        """The message in ``envelope``, if it belongs to the call that this rank is in."""
        match envelope:
            case [str(theirs), message] if theirs == self._call():
                return message
            case [str(theirs), _]:
                self._failures.wait(1.0)  # another rank may have found out before
                self._failures.check()
                raise LdtError(
                    f"rank {self._ranks[source]} is in {theirs or 'no call'}, rank {self._ranks[self._rank]} is in "
                    f"{self._call() or 'no call'}: every rank must make the same calls in the same order"
                )
        raise LdtError(
            f"rank {self._ranks[source]} sent a control message of another form: {str(envelope)[:80]}"
        )

    def _broadcast(self, tensor: torch.Tensor, source: int, seconds: float | None) -> None:
        assert self._group is not None
        work = dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
        mine = self._rank == source
        what = "the others to take a message" if mine else f"a message of rank {self._ranks[source]}"
        wait_or_fail(work, self._failures, what, seconds)


def _encode(message: Any) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > _MAX_BYTES:
        raise LdtError(f"a control message of {len(data)} bytes is too long: at most {_MAX_BYTES}")
    return data


def _decode(data: bytes, source: int) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise LdtError(f"rank {source} sent a control message that is not JSON: {error}") from error


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())
