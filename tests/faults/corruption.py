"""Headers and control messages that arrive as something else than what was meant."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ldt
from ldt.runtime.control.control_plane import ControlPlane
from ldt.runtime.control.edge_broadcast import EdgeMessage, Outbox

__all__ = ["CORRUPTIONS"]

_HEAD_BYTES = 24
_MAGIC_BYTES = 6  # of a step message, with its version and kind
_LONG_CALL_SECONDS = 2.5  # calls as long as this are compared with those of others, in vain


class _Scrambled(NamedTuple):
    """A letter with other bytes in ``place``."""

    edge_message: EdgeMessage
    place: slice

    @property
    def subject(self) -> Any:
        return self.edge_message.subject

    @property
    def number(self) -> int:
        return self.edge_message.number

    def to_bytes(self) -> bytes:
        data = bytearray(self.edge_message.to_bytes())
        data[self.place] = bytes(byte ^ 0xA5 for byte in data[self.place])
        return bytes(data)


def letter_head(mesh: ldt.Mesh) -> None:
    """The head of the next letter of the edge."""
    _scramble_next_letter(slice(0, _HEAD_BYTES))


def step_message(mesh: ldt.Mesh) -> None:
    """The head of the next step message, within its letter."""
    _scramble_next_letter(slice(_HEAD_BYTES, _HEAD_BYTES + _MAGIC_BYTES))


def wrong_sum(mesh: ldt.Mesh) -> None:
    """The number that says which call the next sum belongs to."""
    plain = ControlPlane._mark

    def mark(plane: ControlPlane) -> float:
        ControlPlane._mark = plain  # type: ignore[method-assign]
        return plain(plane) + 1.0

    ControlPlane._mark = mark  # type: ignore[method-assign]


def failure_key(mesh: ldt.Mesh) -> None:
    """What stands in the store where failures are reported."""
    mesh.store.set(f"{mesh.key}/failure", os.urandom(20))


def call_key(mesh: ldt.Mesh) -> None:
    """What stands in the store about the next call. It is read where a call is long, so this rank is late for it."""
    desync = mesh.detector.desync
    mesh.store.set(f"{desync._key}/{desync._count + 1}", os.urandom(20))
    time.sleep(_LONG_CALL_SECONDS)


def _scramble_next_letter(place: slice) -> None:
    plain = Outbox.send

    def send(outbox: Outbox, edge_message: EdgeMessage) -> None:
        Outbox.send = plain  # type: ignore[method-assign]
        plain(outbox, _Scrambled(edge_message, place))  # type: ignore[arg-type]

    Outbox.send = send  # type: ignore[method-assign]


CORRUPTIONS: dict[str, Callable[[ldt.Mesh], None]] = {
    "letter_head": letter_head,
    "step_message": step_message,
    "sum": wrong_sum,
    "failure_key": failure_key,
    "call_key": call_key,
}
