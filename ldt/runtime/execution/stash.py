"""Keeps received tensors until their chunk and microbatch use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ldt.runtime.comm.transfer_modes import CompositeWork
from ldt.topology import Direction

__all__ = ["ActivationStash", "Slot", "Stashed"]


class Slot(NamedTuple):
    """Input of ``chunk`` ("F") or gradient of its output ("B"), for one microbatch."""

    chunk: int
    direction: Direction
    microbatch: int


@dataclass
class Stashed:
    """Tensors that have arrived, or that a transfer in flight writes into. None is an absent gradient.

    With ``unpack``, of a transfer, they are what it returns afterwards.
    """

    tensors: Sequence[Any]
    work: CompositeWork | None = None
    unpack: Callable[[], Sequence[Any]] | None = None


class ActivationStash:
    """Maps slots to tensors. Each slot is put once and taken once; a verified plan guarantees it."""

    def __init__(self) -> None:
        self._slots: dict[Slot, Stashed] = {}

    def put(self, slot: Slot, stashed: Stashed) -> None:
        assert slot not in self._slots, f"{slot} was received twice"
        self._slots[slot] = stashed

    def take(self, slot: Slot) -> Stashed:
        assert slot in self._slots, f"{slot} is used before it is received"
        return self._slots.pop(slot)

    def clear(self) -> None:
        self._slots.clear()
