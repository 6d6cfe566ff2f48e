"""Keeps received tensors until their chunk and microbatch use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ldt.runtime.comm.packed_message import Arrival
from ldt.topology import Direction

__all__ = ["ActivationStash", "Slot"]


class Slot(NamedTuple):
    """Input of ``chunk`` ("F") or gradient of its output ("B"), for one microbatch."""

    chunk: int
    direction: Direction
    microbatch: int


class ActivationStash:
    """Maps slots to tensors of this node, None for an absent gradient, or to a message on its way.

    Each slot is put once and taken once; a verified plan guarantees it.
    """

    def __init__(self) -> None:
        self._slots: dict[Slot, Sequence[Any] | Arrival] = {}

    def put(self, slot: Slot, stashed: Sequence[Any] | Arrival) -> None:
        assert slot not in self._slots, f"{slot} was received twice"
        self._slots[slot] = stashed

    def take(self, slot: Slot) -> Sequence[Any] | Arrival:
        assert slot in self._slots, f"{slot} is used before it is received"
        return self._slots.pop(slot)

    def clear(self) -> None:
        self._slots.clear()
