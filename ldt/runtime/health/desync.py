"""Detects desync: ranks that wait for each other in different collective calls."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ldt.errors import LdtError
from ldt.runtime.common.managed import managed
from ldt.runtime.common.peer_messages import parse, plain, quoted

__all__ = ["CLOSED", "EXITED", "Desync", "DesyncDetector"]

COMPARE_AFTER_SECONDS = 0.5  # shorter calls are not compared
_KEPT_CALLS = 4  # entries of this rank that stay in the store
_NAME_LIMIT = 200
CLOSED = "closed its mesh"
EXITED = "exited without closing its mesh"


class Desync(NamedTuple):
    """Two ranks are in different calls. ``rank`` is the one at fault, if known."""

    rank: int | None
    text: str


class _Call(NamedTuple):
    number: int
    name: str
    since: float
    thread: int


class DesyncDetector:
    """Numbers the calls of one rank and compares the long ones with other ranks' calls of the same number.

    The first rank that stays in call n, or closes instead, writes the call's name to the store; the others compare
    theirs with it. That costs one store request per rank and long call, made by the watchdog thread, and none for a
    short call. ``rank`` is the global rank.
    """

    def __init__(self, key: str, rank: int) -> None:
        self._key = key
        self._rank = rank
        self._lock = threading.Lock()
        self._count = 0
        self._current: _Call | None = None
        self._compared = 0
        self._written: list[int] = []

    @managed
    def calling(self, name: str) -> Iterator[None]:
        """Wraps a call that every rank must make. Raises LdtError inside another one, on any thread."""
        with self._lock:
            self._refuse_within(name)
            self._count += 1
            self._current = _Call(self._count, name, time.monotonic(), threading.get_ident())
        try:
            yield
        finally:
            with self._lock:
                self._current = None

    def check_free(self, name: str) -> None:
        """Raise LdtError if this rank is in a call, so that ``name`` cannot be called."""
        with self._lock:
            self._refuse_within(name)

    @property
    def in_this_thread(self) -> bool:
        """Whether this thread is in a call."""
        with self._lock:
            return self._current is not None and self._current.thread == threading.get_ident()

    @property
    def current(self) -> str:
        """The name and number of this rank's call, or "". Ranks that make the same calls get equal texts."""
        with self._lock:
            return "" if self._current is None else f"{self._current.name} (call {self._current.number})"

    def compare(self, store: Any) -> Desync | None:
        """A desync, if this rank's call has lasted for a while and another rank makes a different one."""
        with self._lock:
            call = self._current
        if (
            call is None
            or call.number == self._compared
            or time.monotonic() - call.since < COMPARE_AFTER_SECONDS
        ):
            return None
        found = self._exchange(store, call.number, call.name)
        self._compared = call.number
        return found

    def finish(self, store: Any, how: str = CLOSED) -> Desync | None:
        """Announce that this rank makes no more calls. Returns a desync if another rank waits in the next call."""
        with self._lock:
            number = self._count + 1
        return self._exchange(store, number, how)

    def _refuse_within(self, name: str) -> None:
        call = self._current
        if call is not None:
            where = "inside" if call.thread == threading.get_ident() else "by another thread during"
            raise LdtError(
                f"{name} was called {where} {call.name} (call {call.number}), which has not returned: chunks, hooks, "
                "loss_fn, plan_factory and data must not call the mesh that runs them, and a mesh serves one thread at "
                "a time, so connect one mesh per thread"
            )

    def _exchange(self, store: Any, number: int, name: str) -> Desync | None:
        key = f"{self._key}/{number}"
        text = store.compare_set(key, "", json.dumps([self._rank, name]))
        try:
            first, first_name = _entry(parse(text))
        except ValueError:
            what = f"the store holds {quoted(text)} instead of a rank's call {number}: check what else writes to it"
            return Desync(None, what)
        if first == self._rank:
            self._written.append(number)
            while len(self._written) > _KEPT_CALLS:
                store.delete_key(f"{self._key}/{self._written.pop(0)}")
        if first_name == name:
            return None
        states = [_describe(first, first_name, number), _describe(self._rank, name, number)]
        exited = [rank for rank, what in ((first, first_name), (self._rank, name)) if what == EXITED]
        text = f"{states[0]}, {states[1]}: every rank must make the same calls in the same order"
        return Desync(exited[0] if len(exited) == 1 else None, text)


def _entry(value: Any) -> tuple[int, str]:
    match value:
        case [int(rank), str(name)]:
            return rank, plain(name, _NAME_LIMIT)
    raise ValueError("expected [rank, name]")


def _describe(rank: int, name: str, number: int) -> str:
    if name in (CLOSED, EXITED):
        return f"rank {rank} {name} after call {number - 1}"
    return f"rank {rank} is in {name} (call {number})"
