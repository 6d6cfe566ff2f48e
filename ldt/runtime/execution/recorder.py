"""Records when each action of a step ran and how long it waited. All ranks of a host share one clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from ldt.plan import Action, Kind
from ldt.runtime.common.managed import managed

__all__ = ["Entry", "Recorder"]


@dataclass
class Entry:
    """One action: start and end in seconds since the epoch, and the seconds ``waited`` for a transfer.

    These are host times. On a device with streams (CUDA, NPU) they say when work was launched, not when it ran.
    For a send or receive, ``end`` is when the host saw the transfer complete, at the latest when it was needed.
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


class Timer(Protocol):
    """The interface of StreamTimer."""

    @property
    def moments(self) -> bool: ...
    def begin(self, entry: Entry) -> None: ...
    def end(self, entry: Entry) -> None: ...
    def resolve(self) -> None: ...


@dataclass
class Recorder:
    """The entries of one step on one rank.

    With a ``timer``, ``finish`` replaces the host times of compute actions by times on the stream. If these have
    moments, transfers are moved to them: as late as their message was computed, and as late as it was needed.
    """

    timer: Timer | None = None
    entries: list[Entry] = field(default_factory=list)
    flushing: float = 0.0
    _offset: float = field(default_factory=lambda: time.time() - time.perf_counter())

    def now(self) -> float:
        return time.perf_counter() + self._offset

    @managed
    def action(self, action: Action) -> Iterator[Entry]:
        timer = self.timer if action.kind.is_compute else None
        entry = Entry(action, self.now(), 0.0)
        self.entries.append(entry)
        if timer is not None:
            timer.begin(entry)
        try:
            yield entry
            if timer is not None:
                timer.end(entry)
        finally:
            entry.end = self.now()

    def has_waited(self, entry: Entry, seconds: float) -> None:
        """Record that a compute action has waited for its input until now, ``seconds`` of it on the host."""
        entry.waited += seconds
        if self.timer is not None:
            self.timer.begin(entry)

    def finish(self) -> None:
        if self.timer is not None:
            self.timer.resolve()
            if self.timer.moments:
                self._fit_transfers()

    def _fit_transfers(self) -> None:
        """Streams send after the action that computed the message, and have received before the one that needs it."""
        computed = {
            (entry.action.chunk, "F" if entry.action.kind is Kind.F else "B", entry.action.microbatch): entry
            for entry in self.entries
            if entry.action.kind.is_compute and entry.action.kind is not Kind.W
        }
        for entry in self.entries:
            action = entry.action
            if action.kind.is_comm:
                user = computed[action.chunk, action.kind.direction, action.microbatch]
                if action.kind.is_send:
                    entry.start = max(entry.start, user.end)
                entry.end = max(entry.end, entry.start if action.kind.is_send else user.start)

    @property
    def computing(self) -> float:
        """Seconds in compute and reduce actions without waiting. On CUDA and NPU, the time to launch them."""
        return sum(e.end - e.start - e.waited for e in self.entries if not e.action.kind.is_comm)

    @property
    def waiting(self) -> float:
        """Seconds the host was blocked on transfers. Near zero on CUDA and NPU, where streams wait instead."""
        return self.flushing + sum(e.waited for e in self.entries)
