"""Tracks what a rank is doing: its call, its action, what it waits for and what it received last."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ldt.plan import Plan
from ldt.runtime.common.managed import managed
from ldt.runtime.common.peer_messages import parse, plain

__all__ = ["Progress", "RankStatus"]

_TEXT_LIMIT = 300


@dataclass(frozen=True)
class RankStatus:
    """A rank at one moment. It holds only names and numbers, so even the edge's status may go to all ranks.

    ``beat`` counts the rank's heartbeats, ``index`` is the action's index in its row of the plan, and ``seconds`` the
    time since the rank last made progress.
    """

    beat: int
    call: str = ""
    action: str = ""
    index: int = -1
    waits_for: str = ""
    received: str = ""
    seconds: float = 0.0
    closed: bool = False

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes | str) -> RankStatus:
        """Inverse of ``to_text``. Invalid input gives a status that says so: this must not hide the actual failure."""
        try:
            fields: dict[str, Any] = parse(text)
            types = {name: type(value) for name, value in asdict(cls(0)).items()}
            return cls(**{name: _checked(fields[name], kind) for name, kind in types.items()})
        except (ArithmeticError, KeyError, TypeError, ValueError):
            return cls(
                -1, action="an unreadable status: check that all ranks run the same version of this package"
            )

    @property
    def is_waiting(self) -> bool:
        return bool(self.waits_for)

    def describe(self) -> str:
        """Completes "rank 2 was last seen ..."."""
        if self.closed:
            return "closing its mesh"
        where = f"in {', '.join(filter(None, (self.call, self.action)))}" if self.call else "outside any call"
        waiting = f", waiting for {self.waits_for}" if self.waits_for else ""
        received = f"; received last: {self.received}" if self.received else ""
        return f"{where}{waiting}, for {self.seconds:.1f} s{received}"


class Progress:
    """Updated by the thread that makes the calls, read by the watchdog thread."""

    def __init__(self) -> None:
        self.call = ""
        self.action = ""
        self.plan: Plan | None = None
        self.thread = threading.get_ident()
        self.closed = False
        self._index = -1
        self._waits_for = ""
        self._received = ""
        self._since = time.monotonic()
        self._beat = 0

    @managed
    def calling(self, name: str) -> Iterator[None]:
        """Wraps a collective call."""
        self.call, self.thread = name, threading.get_ident()
        self._moved()
        try:
            yield
        finally:
            self.call, self.action, self.plan, self._index = "", "", None, -1
            self._moved()

    def begin(self, plan: Plan) -> None:
        """Start running a row of ``plan``."""
        self.plan, self._index = plan, 0

    def begin_action(self, action: str, index: int) -> None:
        self.action, self._index = action, index
        self._moved()

    @managed
    def waiting(self, what: str, received: str = "") -> Iterator[None]:
        """Wraps a wait for ``what``. At its end ``received``, if given, has arrived."""
        outer = self._waits_for
        self._waits_for = what
        try:
            yield
        finally:
            self._waits_for = outer
        self._received = received or self._received
        self._moved()

    @property
    def seconds(self) -> float:
        """Seconds since this rank last made progress."""
        return time.monotonic() - self._since

    def status(self) -> RankStatus:
        """The current status, with the next heartbeat number."""
        self._beat += 1
        texts = (text[:_TEXT_LIMIT] for text in (self.call, self.action, self._waits_for, self._received))
        call, action, waits_for, received = texts
        seconds = round(self.seconds, 1)
        return RankStatus(self._beat, call, action, self._index, waits_for, received, seconds, self.closed)

    def _moved(self) -> None:
        self._since = time.monotonic()


def _checked(value: Any, kind: type) -> Any:
    if kind is float:
        kind, value = float, float(value)
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return plain(value, _TEXT_LIMIT) if isinstance(value, str) else value
