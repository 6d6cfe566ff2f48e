"""Watches for the first failure of a mesh: published to the store by who fails, watched for by everyone else."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ldt.runtime.health.connections import Connections
from ldt.runtime.health.failure_report import FailureReport

__all__ = ["FailureReport", "HealthCheck", "Watchdog"]

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
_JOIN_SECONDS = 2.0
_IDLE_SECONDS = 0.7  # several times what a rank takes to learn of a failure
_GRACE_SECONDS = 1.0  # for ranks to leave what they wait in, one after the other
_LOST_SECONDS = 1.0  # how long the store may refuse
_ANSWER_SECONDS = 30.0  # how long it may say nothing
_STORE_ERRORS = (RuntimeError, OSError)
HealthCheck = Callable[[Any], "FailureReport | None"]  # given the store: what is wrong, if something is

# The threads must have ended before the interpreter goes: one that comes back from the store then would abort it.
_running: weakref.WeakSet[Watchdog] = weakref.WeakSet()


# A forked child has none of the threads, but all of what Python does at the end.
os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _stop_all() -> None:
    for watch in list(_running):
        try:
            watch.on_exit()
        except Exception:  # the others must end all the same
            logger.exception("a mesh could not tell that its process ends")


def _freeze() -> None:
    """Most of a failed process's end is the collector walking through torch's modules: spare it that."""
    gc.freeze()


class Watchdog:
    """Knows the first failure of the mesh, whichever rank it happened on.

    A thread looks into the store every 0.1 s over a connection of its own, so that a rank that is blocked in a
    transfer is freed: ``on_failure`` is called once, from that thread or from the one that publishes. A second later,
    unless this is closed by then, the thread calls ``force_abort``. It also runs ``health_checks`` in turn and
    publishes what they find. A store that does not answer within ``answer_seconds`` counts as a failure, too.
    """

    def __init__(
        self,
        store: Any,
        key: str,
        on_failure: Callable[[FailureReport], None],
        health_checks: Sequence[HealthCheck] = (),
        force_abort: Callable[[], None] = lambda: None,
        answer_seconds: float = _ANSWER_SECONDS,
    ) -> None:
        self._connection = Connections()
        with self._connection.recording(store):
            self._store = store.clone() if hasattr(store, "clone") else store
        self._connection.set_read_timeout(answer_seconds)
        atexit.unregister(_freeze)  # whatever failed before, the process has gone on
        self._key = key
        self._on_failure = on_failure
        self._lookouts = health_checks
        self._force_abort = force_abort
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._first: FailureReport | None = None
        self._known = threading.Event()
        self._stop = threading.Event()
        self.on_exit: Callable[[], None] = (
            self.close
        )  # called when the interpreter ends, unless closed by then
        self._thread = threading.Thread(target=self._run, name="ldt-failure-watch", daemon=True)
        self._thread.start()
        _running.add(self)

    @property
    def first(self) -> FailureReport | None:
        return self._first

    @property
    def store(self) -> Any:
        """Its connection to the store: one that answers in a limited time."""
        return self._store

    @property
    def key(self) -> str:
        """Where the first failure is in the store. What is the mesh's own may stand below it."""
        return self._key

    def publish(self, report: FailureReport) -> FailureReport:
        """Report a failure. Returns the one that was first, which may be another rank's."""
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
        """Stop the thread. One that waits for an answer of the store is not left to wait for long."""
        _running.discard(self)
        self._closed.set()
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)
            if self._thread.is_alive():
                self._connection.shutdown()
                self._thread.join(_JOIN_SECONDS)

    def leave(self, farewell: HealthCheck) -> None:
        """Stop the thread; unless the mesh has failed, ask ``farewell``, too, and leave what it finds to others."""
        self.close()
        if self._thread.is_alive():
            return
        try:
            report = farewell(self._store) if self._first is None else None
            if report is not None:
                self._store.compare_set(self._key, "", report.to_text())
        except Exception as error:  # the process that keeps the store may have ended: then nobody waits
            logger.debug("could not tell the store that this rank has closed: %s", error)
        self._store = None  # ends the connection, whoever still has this mesh

    def _settle(self, report: FailureReport) -> FailureReport:
        with self._lock:
            if self._first is not None:
                return self._first
            self._first = report
        self._stop.set()
        atexit.register(_freeze)
        try:
            self._on_failure(report)
        finally:
            self._known.set()
            self._count_in()
        return report

    def _count_in(self) -> None:
        """Say that this rank knows."""
        try:
            self._store.add(f"{self._key}/known", 1)
        except Exception as error:
            logger.debug("could not tell the store that this rank knows of a failure: %s", error)

    def await_known(self, ranks: int, seconds: float) -> None:
        """Wait until so many ``ranks`` know of the failure, or no more get to, or the time is up, or the store gone."""
        deadline = time.monotonic() + seconds
        known, since = 0, time.monotonic()
        try:
            while known < ranks and time.monotonic() < min(deadline, since + _IDLE_SECONDS):
                now = self._store.add(f"{self._key}/known", 0)
                known, since = (now, time.monotonic()) if now > known else (known, since)
                time.sleep(POLL_SECONDS / 2)
        except Exception as error:
            logger.debug("could not ask the store who knows of a failure: %s", error)

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            if self._first is not None and not self._closed.wait(_GRACE_SECONDS):
                self._force_abort()

    def _watch(self) -> None:
        lost_since: float | None = None
        while not self._stop.wait(POLL_SECONDS):
            asked = time.monotonic()
            try:
                text = self._store.get(self._key) if self._store.check([self._key]) else None
                found = None if text is not None else self._look_out()
            except _STORE_ERRORS as error:
                lost_since = lost_since or asked
                seconds = time.monotonic() - lost_since
                if seconds > _LOST_SECONDS:
                    self._settle(FailureReport.of_unknown(_lost_text(seconds, error)))
                continue
            lost_since = None
            if text is not None:
                self._settle(FailureReport.from_text(text))
            elif found is not None:
                self.publish(found)

    def _look_out(self) -> FailureReport | None:
        found = (look(self._store) for look in self._lookouts)
        try:
            return next((report for report in found if report is not None), None)
        except _STORE_ERRORS:
            raise
        except Exception as error:
            logger.exception("the watch for failures has failed")
            return FailureReport.of_unknown(
                f"a rank cannot watch for failures: {type(error).__name__}: {error}"
            )


def _lost_text(seconds: float, error: Exception) -> str:
    return (
        f"the store of the process group has not answered for {seconds:.0f} s: {error}. The process that keeps it, "
        "rank 0 of the world or the launcher, has probably ended or cannot be reached: look at its output and start "
        "the job again"
    )
