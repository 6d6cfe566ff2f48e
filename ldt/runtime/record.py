"""Records when each action of a step ran and how long it waited, on a clock that all ranks of a host share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ldt.plan import Action

__all__ = ["Entry", "Recorder"]


@dataclass
class Entry:
    """One action: seconds since the epoch, and how much of it was spent waiting for a transfer.

    Times of the host. On a device with streams (CUDA, NPU) they tell when work was launched, not when it ran.
    For a send or receive, ``end`` is when the transfer was seen to be done: at the latest when it was needed.
    """

    action: Action
    start: float
    end: float
    waited: float = 0.0

    def to_json(self) -> list[Any]:
        return [str(self.action), self.start, self.end, self.waited]

    @classmethod
    def from_json(cls, data: Any) -> Entry:
        action, start, end, waited = data
        return cls(Action.parse(action), float(start), float(end), float(waited))


@dataclass
class Recorder:
    """The entries of one step on one rank.

    ``settle`` is called before each time that is taken of a compute action: to wait for a device with streams, where
    the times of the host would not do. By default nothing waits.
    """

    settle: Callable[[], object] = lambda: None
    entries: list[Entry] = field(default_factory=list)
    flushing: float = 0.0
    _offset: float = field(default_factory=lambda: time.time() - time.perf_counter())

    def now(self) -> float:
        return time.perf_counter() + self._offset

    @contextmanager
    def action(self, action: Action) -> Iterator[Entry]:
        timed = not action.kind.is_comm
        if timed:
            self.settle()
        entry = Entry(action, self.now(), 0.0)
        self.entries.append(entry)
        try:
            yield entry
            if timed:
                self.settle()
        finally:
            entry.end = self.now()

    @property
    def computing(self) -> float:
        """Seconds in compute and reduce actions, without what they waited; on CUDA and NPU, in launching them."""
        return sum(e.end - e.start - e.waited for e in self.entries if not e.action.kind.is_comm)

    @property
    def waiting(self) -> float:
        """Seconds for which the host was blocked on transfers; on CUDA and NPU next to none, as streams wait there."""
        return self.flushing + sum(e.waited for e in self.entries)
