"""The first failure of a mesh: published to the store by who fails, watched for by everyone else."""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ldt.errors import RemoteStageError

__all__ = ["FailureReport", "FailureWatch"]

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
TRACEBACK_LINES = 12
TEXT_LIMIT = 4000
_JOIN_SECONDS = 2.0


@dataclass(frozen=True)
class FailureReport:
    """Who failed, where, and with what. ``rank`` is the global rank.

    ``error`` is the exception's own text, at most 4000 characters, and goes to all ranks, from the edge too: an
    exception that quotes a sample takes it along.
    """

    rank: int
    stage: int
    replica: int
    place: str
    error: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int, stage: int, replica: int, place: str) -> FailureReport:
        lines = "".join(traceback.format_tb(error.__traceback__)).splitlines()
        text = f"{type(error).__name__}: {error}"
        return cls(rank, stage, replica, place, text[:TEXT_LIMIT], "\n".join(lines[-TRACEBACK_LINES:]))

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> FailureReport:
        """Read what ``to_text`` gives, or whatever else stands there: a report must never fail to be reported."""
        try:
            fields: dict[str, Any] = json.loads(text)
            return cls(**fields)
        except (ValueError, TypeError):
            return cls(-1, -1, -1, "", f"unreadable failure report {text!r}"[:TEXT_LIMIT])

    def describe(self) -> str:
        place = f" in {self.place}" if self.place else ""
        tail = f"\nIts traceback ends with:\n{self.traceback}" if self.traceback else ""
        return f"rank {self.rank} (stage {self.stage}, replica {self.replica}) failed first{place}: {self.error}{tail}"


# The threads must have ended before the interpreter goes: one that comes back from the store then would abort it.
_running: weakref.WeakSet[FailureWatch] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for watch in list(_running):
        watch.close()


class FailureWatch:
    """Knows the first failure of the mesh, whichever rank it happened on.

    A thread looks into the store every 0.1 s over a connection of its own, so that a rank that is blocked in a
    transfer is freed: ``on_failure`` is called once, from that thread or from the one that publishes.
    """

    def __init__(self, store: Any, key: str, on_failure: Callable[[FailureReport], None]) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._key = key
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._first: FailureReport | None = None
        self._known = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ldt-failure-watch", daemon=True)
        self._thread.start()
        _running.add(self)

    @property
    def first(self) -> FailureReport | None:
        return self._first

    def publish(self, report: FailureReport) -> FailureReport:
        """Report a failure of this rank. Returns the failure that was first, which may be another rank's."""
        try:
            report = FailureReport.from_text(self._store.compare_set(self._key, "", report.to_text()))
        except Exception as error:  # the store may be what has failed
            logger.warning("could not publish a failure to the store: %s", error)
        return self._settle(report)

    def wait(self, seconds: float) -> FailureReport | None:
        """The first failure, waiting up to ``seconds`` for one to become known."""
        self._known.wait(seconds)
        return self._first

    def check(self) -> None:
        """Raise RemoteStageError if the mesh has failed."""
        if self._first is not None:
            raise RemoteStageError(self._first.describe())

    def close(self) -> None:
        """Stop the thread. A store that does not answer may hold it a little longer."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _settle(self, report: FailureReport) -> FailureReport:
        with self._lock:
            if self._first is not None:
                return self._first
            self._first = report
        self._stop.set()
        try:
            self._on_failure(report)
        finally:
            self._known.set()
        return report

    def _watch(self) -> None:
        lost_since: float | None = None
        while not self._stop.wait(POLL_SECONDS):
            try:
                if self._store.check([self._key]):
                    self._settle(FailureReport.from_text(self._store.get(self._key)))
                lost_since = None
            except Exception as error:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > 1.0:
                    self._settle(
                        FailureReport(-1, -1, -1, "", f"the store of the process group is gone: {error}")
                    )
