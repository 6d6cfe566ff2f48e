"""The control plane: small JSON messages between all ranks of a mesh, apart from lanes and payloads."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ldt.errors import LdtError
from ldt.runtime.common.peer_messages import parse, plain, quoted, read_or_raise
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.control.collectives import MAX_BYTES, Collectives
from ldt.runtime.health.watchdog import Watchdog
from ldt.topology import Node

__all__ = ["ControlPlane"]

Read = Callable[[Any], Any]  # converts decoded JSON into what the caller expects, or raises
_NAME_LIMIT = 200


def _identity(message: Any) -> Any:
    return message


class ControlPlane:
    """Collective calls that every rank of a mesh makes in the same order.

    Messages are JSON, length-checked and never unpickled. ``call`` names the call that a rank is in. The name travels
    with each message, and its checksum with each sum, so that messages of different calls are never mixed up.
    """

    def __init__(
        self, rank_info: RankInfo, collectives: Collectives, watchdog: Watchdog, call: Callable[[], str]
    ) -> None:
        self._rank_info = rank_info
        self._collectives = collectives
        self._watchdog = watchdog
        self._call = call

    def broadcast(self, message: Any, node: Node, read: Read = _identity) -> Any:
        """Broadcast ``message`` of the leader of ``node``. Every rank returns ``read(message)``.

        Raises LdtError naming the sender if ``read`` raises.
        """
        source = self._rank_info.topology.leader_of(node)
        data = _encode([self._call(), message]) if self._rank_info.rank == source else b""
        return self._open(self._collectives.broadcast(data, node), source, read)

    def all_gather(self, message: Any, read: Read = _identity) -> list[Any]:
        """Gather ``read(message)`` of every rank, in topology order, on every rank."""
        gathered = self._collectives.all_gather(_encode([self._call(), message]))
        return [self._open(data, source, read) for source, data in enumerate(gathered)]

    def gather(self, message: Any, read: Read = _identity) -> list[Any]:
        """Gather ``read(message)`` of every rank, in topology order, on the first rank. Elsewhere returns none."""
        gathered = self._collectives.gather(_encode([self._call(), message]))
        return [self._open(data, source, read) for source, data in enumerate(gathered)]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over all ranks, in double precision."""
        tensor = torch.tensor([*values, self._call_checksum()], dtype=torch.float64, device="cpu")
        *sums, checksum = self._collectives.sum(tensor).tolist()
        if checksum != self._rank_info.topology.world_size * self._call_checksum():
            self._watchdog.wait(1.0)
            self._watchdog.check()
            raise LdtError(
                f"rank {self._global(self._rank_info.rank)} is in {self._call() or 'no call'}, but another rank is in "
                "a different call: every rank must make the same calls in the same order"
            )
        return sums

    def all_gather_in_node(self, numbers: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Gather ``numbers``, of one shape on all ranks of this node. A collective call of these ranks only."""
        return self._collectives.all_gather_in_node(numbers, what)

    def close(self) -> None:
        self._collectives.close()

    def _call_checksum(self) -> float:
        """A checksum of this rank's call: 32 bits, so that its sum over all ranks is exact."""
        return float(zlib.crc32(self._call().encode()))

    def _global(self, rank: int) -> int:
        return self._rank_info.ranks[rank]

    def _open(self, data: bytes, source: int, read: Read) -> Any:
        """The message in ``data``. Raises LdtError if the sender is in another call."""
        envelope = _decode(data, self._global(source))
        match envelope:
            case [str(call), message] if call == self._call():
                return read_or_raise(message, read, f"rank {self._global(source)}")
            case [str(call), _]:
                self._watchdog.wait(1.0)  # another rank may already have reported it
                self._watchdog.check()
                raise LdtError(
                    f"rank {self._global(source)} is in {plain(call, _NAME_LIMIT) or 'no call'}, "
                    f"rank {self._global(self._rank_info.rank)} is in {self._call() or 'no call'}: every rank must "
                    "make the same calls in the same order"
                )
        raise LdtError(f"rank {self._global(source)} sent a malformed control message: {quoted(envelope)}")


def _encode(message: Any) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise LdtError(f"a control message has {len(data)} bytes; at most {MAX_BYTES} are allowed")
    return data


def _decode(data: bytes, source: int) -> Any:
    try:
        return parse(data)
    except ValueError as error:
        raise LdtError(f"rank {source} sent a control message that is not JSON: {error}") from error
