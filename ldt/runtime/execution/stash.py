"""What has come for a chunk and microbatch and was not used yet, and what waits to be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ldt.runtime.comm.transfer import CompositeWork
from ldt.topology import Direction

__all__ = ["ActivationStash", "Slot", "Stashed"]


class Slot(NamedTuple):
    """Input of ``chunk`` ("F") or gradient of its output ("B"), for one microbatch."""

    chunk: int
    direction: Direction
    microbatch: int


@dataclass
class Stashed:
    """Tensors that are there, or that a transfer in flight writes into. None is a gradient that there is not."""

    tensors: Sequence[Any]
    work: CompositeWork | None = None


class ActivationStash:
    """One slot, one arrival: put once, taken once. Anything else is a plan that was not verified."""

    def __init__(self) -> None:
        self._slots: dict[Slot, Stashed] = {}

    def put(self, slot: Slot, arrival: Stashed) -> None:
        assert slot not in self._slots, f"{slot} came twice"
        self._slots[slot] = arrival

    def take(self, slot: Slot) -> Stashed:
        assert slot in self._slots, f"{slot} is used before it was received"
        return self._slots.pop(slot)

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self) -> None:
        self._slots.clear()
