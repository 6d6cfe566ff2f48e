"""The first failure of a mesh: published to the store by who fails, watched for by everyone else."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ldt.errors import RemoteStageError
from ldt.runtime.attendance import Attendance
from ldt.runtime.disclosure import TEXT_LIMIT, disclose, reveal
from ldt.runtime.received import quoted, read_fields

__all__ = ["FailureReport", "FailureWatch"]

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
_JOIN_SECONDS = 2.0
_LOST_SECONDS = 1.0  # how long the store may not answer


@dataclass(frozen=True)
class FailureReport:
    """Who failed, where, and with what; it goes to all ranks. ``rank`` is the global rank, None where it is not known.

    ``error`` is the text of the exception, and ``traceback`` the end of its traceback, where ``of`` is told to give
    them in full, as for a rank of the cloud. Otherwise ``error`` is what ``disclose`` lets out.
    """

    rank: int | None
    stage: int | None
    replica: int | None
    place: str
    error: str
    error_type: str | None = None
    traceback: str = ""

    @classmethod
    def of(
        cls, error: BaseException, rank: int, stage: int, replica: int, place: str, *, in_full: bool
    ) -> FailureReport:
        text, trace = reveal(error) if in_full else (disclose(error), "")
        return cls(rank, stage, replica, place, text, type(error).__name__, trace)

    @classmethod
    def of_unknown(cls, error: str) -> FailureReport:
        """A failure that is not known to be that of a rank."""
        return cls(None, None, None, "", error[:TEXT_LIMIT])

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> FailureReport:
        """Read what ``to_text`` gives, or whatever else stands there: a report must never fail to be reported."""
        try:
            return read_fields(cls, text)
        except ValueError:
            return cls.of_unknown(
                f"unreadable failure report {quoted(text)}: do all ranks run the same version of this package?"
            )

    def describe(self) -> str:
        if self.rank is None:
            return f"the mesh has failed: {self.error}"
        place = f" in {self.place}" if self.place else ""
        tail = f"\nIts traceback ends with:\n{self.traceback}" if self.traceback else ""
        return f"rank {self.rank} (stage {self.stage}, replica {self.replica}) failed first{place}: {self.error}{tail}"

    def as_error(self, before: str = "") -> RemoteStageError:
        """What the other ranks raise; the text ``before`` goes before the report."""
        return RemoteStageError(
            before + self.describe(),
            rank=self.rank,
            stage=self.stage,
            place=self.place or None,
            error_type=self.error_type,
        )


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
    With ``attendance`` the thread also publishes that ranks wait for each other in different calls, and with
    ``overdue`` what that returns if it is not empty.
    """

    def __init__(
        self,
        store: Any,
        key: str,
        on_failure: Callable[[FailureReport], None],
        attendance: Attendance | None = None,
        overdue: Callable[[], str] = str,
    ) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._key = key
        self._on_failure = on_failure
        self._attendance = attendance
        self._overdue = overdue
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
            raise self._first.as_error() from None  # whatever was being handled came of that failure

    def close(self) -> None:
        """Stop the thread. A store that does not answer may hold it a little longer."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def leave(self) -> None:
        """Stop the thread and say that this rank makes no more calls, to ranks that wait for it now or later."""
        self.close()
        if self._first is not None or self._attendance is None or self._thread.is_alive():
            return
        try:
            trouble = self._attendance.leave(self._store)
            if trouble is not None:
                report = FailureReport.of_unknown(trouble)
                self._store.compare_set(self._key, "", report.to_text())
        except Exception as error:  # the process that keeps the store may have ended: then nobody waits
            logger.debug("could not tell the store that this rank has closed: %s", error)

    def _settle(self, report: FailureReport) -> FailureReport:
        with self._lock:
            if self._first is not None:
                return self._first
            self._first = report
        self._stop.set()
        # Most of a failed process's end is the collector walking through torch's modules: spare it that.
        atexit.register(gc.freeze)
        try:
            self._on_failure(report)
        finally:
            self._known.set()
        return report

    def _ask_for_overdue(self) -> str:
        """A device that has failed answers with an error, which is as good a reason."""
        try:
            return self._overdue()
        except Exception as error:
            return f"lanes cannot be asked what is under way: {type(error).__name__}: {error}"

    def _watch(self) -> None:
        lost_since: float | None = None
        while not self._stop.wait(POLL_SECONDS):
            try:
                text = self._store.get(self._key) if self._store.check([self._key]) else None
                trouble = self._attendance.compare(self._store) if self._attendance is not None else None
            except Exception as error:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > _LOST_SECONDS:
                    self._settle(FailureReport.of_unknown(_lost_text(error)))
                continue
            lost_since = None
            trouble = trouble or self._ask_for_overdue()
            if text is not None:
                self._settle(FailureReport.from_text(text))
            elif trouble:
                self.publish(FailureReport.of_unknown(trouble))


def _lost_text(error: Exception) -> str:
    return (
        f"the store of the process group has not answered for {_LOST_SECONDS:g} s: {error}. The process that keeps it, "
        "rank 0 of the world or the launcher, has probably ended or cannot be reached: look at its output and start "
        "the job again"
    )
