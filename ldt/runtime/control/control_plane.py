"""The control plane: small messages as JSON between all ranks of a mesh, apart from the lanes and their payloads."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ldt.errors import LdtError
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.common.untrusted import parse, plain, quoted, read_or_raise
from ldt.runtime.control.collectives import MAX_BYTES, Collectives
from ldt.runtime.health.watchdog import Watchdog
from ldt.topology import Node

__all__ = ["ControlPlane"]

Read = Callable[[Any], Any]  # makes of what JSON stands for what the caller expects, or raises
_NAME_LIMIT = 200


def _as_it_is(message: Any) -> Any:
    return message


class ControlPlane:
    """Collective calls of all ranks of a mesh, which every rank makes in the same order.

    Messages are JSON, length-checked, never unpickled. ``call`` names the call that a rank is in; it travels with each
    message, so that none is taken for one of another call, and every sum carries a number for it.
    """

    def __init__(
        self, rank_info: RankInfo, collectives: Collectives, watchdog: Watchdog, call: Callable[[], str]
    ) -> None:
        self._rank_info = rank_info
        self._collectives = collectives
        self._watchdog = watchdog
        self._call = call

    def broadcast(self, message: Any, node: Node, read: Read = _as_it_is) -> Any:
        """What the leader of ``node`` gives as ``message``, on every rank, as ``read`` reads it there.

        Raises LdtError naming the sender where ``read`` cannot.
        """
        source = self._rank_info.topology.leader_of(node)
        data = _encode([self._call(), message]) if self._rank_info.rank == source else b""
        return self._opened(self._collectives.broadcast(data, node), source, read)

    def all_gather(self, message: Any, read: Read = _as_it_is) -> list[Any]:
        """Every rank's ``message``, by rank of the topology, on every rank, as ``read`` reads each."""
        answers = self._collectives.all_gather(_encode([self._call(), message]))
        return [self._opened(data, source, read) for source, data in enumerate(answers)]

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks, in double precision."""
        tensor = torch.tensor([*values, self._mark()], dtype=torch.float64, device="cpu")
        *sums, mark = self._collectives.sum(tensor).tolist()
        if mark != self._rank_info.topology.world_size * self._mark():
            self._watchdog.wait(1.0)
            self._watchdog.check()
            raise LdtError(
                f"rank {self._global(self._rank_info.rank)} is in {self._call() or 'no call'}, another one in another "
                "call that makes a sum: every rank must make the same calls in the same order"
            )
        return sums

    def all_gather_in_node(self, numbers: torch.Tensor, what: str) -> list[torch.Tensor]:
        """``numbers`` of each rank of this node; a collective call of these alone, which have as many."""
        return self._collectives.all_gather_in_node(numbers, what)

    def close(self) -> None:
        self._collectives.close()

    def _mark(self) -> float:
        """A number for the call that this rank is in. Sums of as many as there are ranks are exact."""
        return float(zlib.crc32(self._call().encode()))

    def _global(self, rank: int) -> int:
        return self._rank_info.ranks[rank]

    def _opened(self, data: bytes, source: int, read: Read) -> Any:
        """The message in ``data``, if it belongs to the call that this rank is in."""
        envelope = _decode(data, self._global(source))
        match envelope:
            case [str(theirs), message] if theirs == self._call():
                return read_or_raise(message, read, f"rank {self._global(source)}")
            case [str(theirs), _]:
                self._watchdog.wait(1.0)  # another rank may have found out before
                self._watchdog.check()
                raise LdtError(
                    f"rank {self._global(source)} is in {plain(theirs, _NAME_LIMIT) or 'no call'}, "
                    f"rank {self._global(self._rank_info.rank)} is in {self._call() or 'no call'}: every rank must "
                    "make the same calls in the same order"
                )
        raise LdtError(
            f"rank {self._global(source)} sent a control message of another form: {quoted(envelope)}"
        )


def _encode(message: Any) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise LdtError(f"a control message of {len(data)} bytes is too long: at most {MAX_BYTES}")
    return data


def _decode(data: bytes, source: int) -> Any:
    try:
        return parse(data)
    except ValueError as error:
        raise LdtError(f"rank {source} sent a control message that is not JSON: {error}") from error
