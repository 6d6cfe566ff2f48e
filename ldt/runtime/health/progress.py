"""What a rank is doing, as others are told of it: its call, its action, what it waits for, what came last."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ldt.plan import Plan
from ldt.runtime.common.managed import managed
from ldt.runtime.common.untrusted import parse, plain

__all__ = ["Progress", "RankStatus"]

_TEXT_LIMIT = 300


@dataclass(frozen=True)
class RankStatus:
    """A rank at one moment. ``index`` is that of its action in its row; ``seconds``, for how long it has not got on.

    ``beat`` counts those of the rank. It holds names and numbers only, so that of the edge may be shown to all.
    """

    beat: int
    call: str = ""
    place: str = ""
    index: int = -1
    waits_for: str = ""
    received: str = ""
    seconds: float = 0.0
    closed: bool = False

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes | str) -> RankStatus:
        """What ``to_text`` gives; one that says nothing for anything else, as it may be the reason of a failure."""
        try:
            fields: dict[str, Any] = parse(text)
            types = {name: type(value) for name, value in asdict(cls(0)).items()}
            return cls(**{name: _checked(fields[name], kind) for name, kind in types.items()})
        except (ArithmeticError, KeyError, TypeError, ValueError):
            return cls(-1, place="what cannot be read: do all ranks run the same version of this package?")

    @property
    def is_waiting(self) -> bool:
        return bool(self.waits_for)

    def describe(self) -> str:
        """As the end of "rank 2 was last seen ..."."""
        if self.closed:
            return "closing its mesh"
        place = (
            f"in {', '.join(filter(None, (self.call, self.place)))}" if self.call else "outside of any call"
        )
        waiting = f", waiting for {self.waits_for}" if self.waits_for else ""
        received = f"; received last: {self.received}" if self.received else ""
        return f"{place}{waiting}, for {self.seconds:.1f} s{received}"


class Progress:
    """Kept by the thread that makes the calls, read by the one that watches."""

    def __init__(self) -> None:
        self.call = ""
        self.place = ""
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
        """Held around a collective call."""
        self.call, self.thread = name, threading.get_ident()
        self._moved()
        try:
            yield
        finally:
            self.call, self.place, self.plan, self._index = "", "", None, -1
            self._moved()

    def begin(self, plan: Plan) -> None:
        """A row of ``plan`` is run from now on."""
        self.plan, self._index = plan, 0

    def begin_action(self, place: str, index: int) -> None:
        self.place, self._index = place, index
        self._moved()

    @managed
    def waiting(self, what: str, received: str = "") -> Iterator[None]:
        """Held while this rank can do nothing but wait for ``what``. Then ``received``, if given, has come."""
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
        """Since this rank has got on."""
        return time.monotonic() - self._since

    def status(self) -> RankStatus:
        """A new one each time."""
        self._beat += 1
        texts = (text[:_TEXT_LIMIT] for text in (self.call, self.place, self._waits_for, self._received))
        call, place, waits_for, received = texts
        seconds = round(self.seconds, 1)
        return RankStatus(self._beat, call, place, self._index, waits_for, received, seconds, self.closed)

    def _moved(self) -> None:
        self._since = time.monotonic()


def _checked(value: Any, kind: type) -> Any:
    if kind is float:
        kind, value = float, float(value)
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return plain(value, _TEXT_LIMIT) if isinstance(value, str) else value
