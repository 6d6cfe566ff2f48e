"""Which collective call a rank is in, so that ranks that wait for each other in different ones are told so."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ldt.errors import LdtError
from ldt.runtime.common.managed import managed
from ldt.runtime.common.untrusted import parse, plain, quoted

__all__ = ["CLOSED", "EXITED", "Desync", "DesyncDetector"]

COMPARE_AFTER_SECONDS = 0.5  # a call that is over sooner is not looked into
_KEPT_CALLS = 4  # how many of the entries made by this rank stay in the store
_NAME_LIMIT = 200
CLOSED = "closed its mesh"
EXITED = "exited without closing its mesh"


class Desync(NamedTuple):
    """That two ranks are not in the same call. ``rank`` is the one that is to blame, if that is clear."""

    rank: int | None
    text: str


class _Call(NamedTuple):
    number: int
    name: str
    since: float
    thread: int


class DesyncDetector:
    """Counts the calls of one rank and compares a long one with what other ranks do as their call of that number.

    The first rank that is long in call n, or closes instead of it, leaves its name in the store, the others find it
    there: one request per rank and long call, made by the thread that watches for failures, none for a short one.
    ``rank`` is the global rank.
    """

    def __init__(self, key: str, rank: int) -> None:
        self._key = key
        self._rank = rank
        self._lock = threading.Lock()
        self._count = 0
        self._current: _Call | None = None
        self._compared = 0
        self._mine: list[int] = []

    @managed
    def calling(self, name: str) -> Iterator[None]:
        """To be held around a call that every rank must make. Raises LdtError within another one, on any thread."""
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
        """Raise LdtError if ``name`` cannot be called now, as this rank is in a call."""
        with self._lock:
            self._refuse_within(name)

    @property
    def of_this_thread(self) -> bool:
        """Whether this rank is in a call that this thread has made."""
        with self._lock:
            return self._current is not None and self._current.thread == threading.get_ident()

    @property
    def current(self) -> str:
        """The call that this rank is in, empty for none. Equal on ranks that make the same calls."""
        with self._lock:
            return "" if self._current is None else f"{self._current.name} (call {self._current.number})"

    def compare(self, store: Any) -> Desync | None:
        """What is wrong if another rank makes another call than this one, which has lasted for a while."""
        with self._lock:
            call = self._current
        if (
            call is None
            or call.number == self._compared
            or time.monotonic() - call.since < COMPARE_AFTER_SECONDS
        ):
            return None
        trouble = self._meet(store, call.number, call.name)
        self._compared = call.number
        return trouble

    def leave(self, store: Any, how: str = CLOSED) -> Desync | None:
        """Say that this rank makes no more calls. What is wrong if another one waits for it in the next call."""
        with self._lock:
            number = self._count + 1
        return self._meet(store, number, how)

    def _refuse_within(self, name: str) -> None:
        call = self._current
        if call is not None:
            where = "inside of" if call.thread == threading.get_ident() else "by another thread during"
            raise LdtError(
                f"{name} was called {where} {call.name} (call {call.number}), a call of the same mesh that is not "
                "over: chunks, hooks, loss_fn, plan_factory and data must not call the mesh that runs them, and a mesh "
                "serves one thread at a time, so connect one for each"
            )

    def _meet(self, store: Any, number: int, name: str) -> Desync | None:
        key = f"{self._key}/{number}"
        text = store.compare_set(key, "", json.dumps([self._rank, name]))
        try:
            first, first_name = _entry(parse(text))
        except ValueError:
            what = f"the store has {quoted(text)} where a rank should have left its call {number}: who writes to it?"
            return Desync(None, what)
        if first == self._rank:
            self._mine.append(number)
            while len(self._mine) > _KEPT_CALLS:
                store.delete_key(f"{self._key}/{self._mine.pop(0)}")
        if first_name == name:
            return None
        words = [_words(first, first_name, number), _words(self._rank, name, number)]
        exited = [rank for rank, what in ((first, first_name), (self._rank, name)) if what == EXITED]
        text = f"{words[0]}, {words[1]}: every rank must make the same calls in the same order"
        return Desync(exited[0] if len(exited) == 1 else None, text)


def _entry(value: Any) -> tuple[int, str]:
    match value:
        case [int(rank), str(name)]:
            return rank, plain(name, _NAME_LIMIT)
    raise ValueError("expected [rank, name]")


def _words(rank: int, name: str, number: int) -> str:
    if name in (CLOSED, EXITED):
        return f"rank {rank} {name} after call {number - 1}"
    return f"rank {rank} is in {name} (call {number})"
