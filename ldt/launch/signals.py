"""Signals that end a job: noted by the handler, acted on where the launcher looks."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupted", "Signals"]

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(Exception):  # noqa: N818 (no error: somebody wants the job to end)
    """A signal came while the launcher waited."""


class Signals:
    """Notes signals while it is entered. ``count`` says how many came, ``first`` which was the first."""

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        self._before: dict[int, Any] = {}

    def note(self, number: int, _: FrameType | None = None) -> None:
        """Count a signal."""
        self.count += 1
        self.first = self.first or number

    def install(self) -> None:
        """Set the handlers, again after somebody else has set others. What was ignored stays so, as under nohup."""
        for number in _HANDLED:
            before = self._before.setdefault(number, signal.getsignal(number))
            signal.signal(number, signal.SIG_IGN if before is signal.SIG_IGN else self.note)

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.first is not None:
            raise Interrupted(signal.Signals(self.first).name)

    def __enter__(self) -> Signals:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
