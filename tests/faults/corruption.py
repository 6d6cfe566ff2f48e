"""Corrupts headers and control messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ldt
from ldt.runtime.control.control_plane import ControlPlane
from ldt.runtime.control.edge_messages import EdgeMessage, Outbox

__all__ = ["CORRUPTIONS"]

_HEAD_BYTES = 24
_MAGIC_BYTES = 6  # of a step message, with its version and kind
_LONG_CALL_SECONDS = 2.5  # after this, the desync check reads the keys of other ranks


class _CorruptedMessage(NamedTuple):
    """A message with corrupt bytes in ``span``."""

    edge_message: EdgeMessage
    span: slice

    @property
    def subject(self) -> Any:
        return self.edge_message.subject

    @property
    def number(self) -> int:
        return self.edge_message.number

    def to_bytes(self) -> bytes:
        data = bytearray(self.edge_message.to_bytes())
        data[self.span] = bytes(byte ^ 0xA5 for byte in data[self.span])
        return bytes(data)


def message_head(mesh: ldt.Mesh) -> None:
    """Corrupt the header of the edge's next message."""
    _corrupt_next_message(slice(0, _HEAD_BYTES))


def step_message(mesh: ldt.Mesh) -> None:
    """Corrupt the header of the next step message, inside its edge message."""
    _corrupt_next_message(slice(_HEAD_BYTES, _HEAD_BYTES + _MAGIC_BYTES))


def wrong_sum(mesh: ldt.Mesh) -> None:
    """Corrupt the mark that says to which call the next sum belongs."""
    plain = ControlPlane._call_checksum

    def mark(plane: ControlPlane) -> float:
        ControlPlane._call_checksum = plain  # type: ignore[method-assign]
        return plain(plane) + 1.0

    ControlPlane._call_checksum = mark  # type: ignore[method-assign]


def failure_key(mesh: ldt.Mesh) -> None:
    """Corrupt the store's key for failure reports."""
    mesh._store.set(f"{mesh._key}/failure", os.urandom(20))


def call_key(mesh: ldt.Mesh) -> None:
    """Corrupt the store's key for the next call. Ranks read it during a long call, so this rank is late for it."""
    desync = mesh.detector.desync
    mesh._store.set(f"{desync._key}/{desync._count + 1}", os.urandom(20))
    time.sleep(_LONG_CALL_SECONDS)


def _corrupt_next_message(span: slice) -> None:
    plain = Outbox.send

    def send(outbox: Outbox, edge_message: EdgeMessage) -> None:
        Outbox.send = plain  # type: ignore[method-assign]
        plain(outbox, _CorruptedMessage(edge_message, span))  # type: ignore[arg-type]

    Outbox.send = send  # type: ignore[method-assign]


CORRUPTIONS: dict[str, Callable[[ldt.Mesh], None]] = {
    "message_head": message_head,
    "step_message": step_message,
    "sum": wrong_sum,
    "failure_key": failure_key,
    "call_key": call_key,
}
