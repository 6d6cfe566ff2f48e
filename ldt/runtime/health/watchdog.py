"""The watchdog: the rank that fails first publishes its failure to the store, where all other ranks poll for it."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ldt.runtime.health.failure_report import FailureReport
from ldt.runtime.health.store_connection import StoreConnection

__all__ = ["FailureReport", "HealthCheck", "Watchdog"]

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
_JOIN_SECONDS = 2.0
_IDLE_SECONDS = 0.7  # several times as long as a rank takes to learn of a failure
_GRACE_SECONDS = 1.0  # for ranks to leave their waits one after the other
_STORE_ERROR_SECONDS = 1.0  # how long the store may raise errors while its host is there
_MARGIN_SECONDS = 0.1  # by which a request that was ended may end early
_PUBLISH_SECONDS = 10.0  # at least; on busy machines the store answers late
_STORE_TIMEOUT_SECONDS = 30.0  # how long a store request may take
_STORE_ERRORS = (RuntimeError, OSError)
_T = TypeVar("_T")
HealthCheck = Callable[[Any], "FailureReport | None"]  # takes the store, returns a failure or None

# Stop the threads before the interpreter exits: one that returned from the store afterwards would abort the process.
_running: weakref.WeakSet[Watchdog] = weakref.WeakSet()

# A forked child has no such threads, but runs the same exit handlers.
os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _stop_all() -> None:
    for watchdog in list(_running):
        try:
            watchdog.on_exit()
        except Exception:  # stop the others all the same
            logger.exception("could not announce the exit of this process")


def _freeze() -> None:
    """Speed up the exit of a failed process: the garbage collector would spend most of it on torch's modules."""
    gc.freeze()


class Watchdog:
    """Knows the first failure of the mesh, whichever rank it happened on.

    A thread polls the store every 0.1 s over a connection of its own, so that it can unblock a rank that waits in a
    transfer. A connection that breaks is made again, once the link is back. ``on_failure`` is called once, from that
    thread or from the one that publishes. A second later the thread calls ``force_abort``, unless the watchdog is
    closed by then. The thread also runs ``health_checks`` in turn and publishes what they find. A store that does not
    answer for ``store_timeout`` seconds is a failure, too, which ``lost_text`` may describe. ``on_answer`` gets the
    seconds until it did. ``close`` waits ``extra_wait`` seconds longer for a request, ``publish`` does not.
    """

    def __init__(
        self,
        store: Any,
        key: str,
        on_failure: Callable[[FailureReport], None],
        health_checks: Sequence[HealthCheck] = (),
        force_abort: Callable[[], None] = lambda: None,
        store_timeout: float = _STORE_TIMEOUT_SECONDS,
        *,
        extra_wait: float = 0.0,
        on_answer: Callable[[float], None] = lambda seconds: None,
        lost_text: Callable[[float], str] = lambda seconds: "",
    ) -> None:
        self._store = StoreConnection(store, store_timeout, store_timeout if extra_wait else 0.0)
        atexit.unregister(_freeze)  # the process goes on after an earlier failure
        self._key = key
        self._on_failure = on_failure
        self._health_checks = health_checks
        self._force_abort = force_abort
        self._extra_wait = extra_wait
        self._store_timeout = store_timeout
        self._on_answer = on_answer
        self._lost_text = lost_text
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._first: FailureReport | None = None
        self._own: FailureReport | None = None  # that is being published
        self._known = threading.Event()
        self._poll_ended = threading.Event()
        self.on_exit: Callable[[], None] = self.close  # called at interpreter exit unless closed by then
        self._thread = threading.Thread(target=self._run, name="ldt-watchdog", daemon=True)
        self._thread.start()
        _running.add(self)

    @property
    def first(self) -> FailureReport | None:
        return self._first

    @property
    def store(self) -> Any:
        """The watchdog's connection to the store, which has a read timeout."""
        return self._store

    @property
    def key(self) -> str:
        """The store key of the first failure. Other keys of the mesh may start with it."""
        return self._key

    def publish(self, report: FailureReport) -> FailureReport:
        """Publish a failure. Returns the first one, which may be another rank's."""
        self._own = self._own or report
        seconds = max(self._store_timeout - self._extra_wait, _PUBLISH_SECONDS)
        try:
            with self._store.ended_after(seconds):
                text = report.to_text()
                written = self._request(lambda: self._store.compare_set(self._key, "", text), seconds)
            report = FailureReport.from_text(written)
        except Exception as error:  # the store itself may have failed
            logger.warning("could not publish a failure to the store: %s", error)
        return self._set_first(report)

    def _request(self, request: Callable[[], _T], seconds: float) -> _T:
        """Call ``request``, again if its connection breaks within ``seconds`` and can be made again by then."""
        asked, renewed = time.monotonic(), False
        while True:
            try:
                return request()
            except _STORE_ERRORS:
                # A connection that breaks fails at once. A host that hangs still accepts connections, but answers none.
                hangs = time.monotonic() - asked > seconds - _MARGIN_SECONDS
                if hangs or renewed or self._first is not None:
                    raise
                renewed = self._store.renew()
                if not (renewed or self._store.may_return):
                    raise
                time.sleep(POLL_SECONDS)

    def wait(self, seconds: float) -> FailureReport | None:
        """Wait up to ``seconds`` for a failure. Returns the first one, or None."""
        self._known.wait(seconds)
        return self._first

    def check(self) -> None:
        """Raise RemoteStageError if the mesh has failed."""
        if self._first is not None:
            raise self._first.as_error() from None  # an error in flight is a consequence of that failure

    def close(self) -> None:
        """Stop the thread. If it is blocked on the store, shut its connection down after two seconds."""
        _running.discard(self)
        self._closed.set()
        self._poll_ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS + (self._extra_wait if self._first is None else 0.0))
            if self._thread.is_alive():
                self._store.shutdown()
                self._thread.join(_JOIN_SECONDS)

    def stop(self, last_check: HealthCheck) -> None:
        """Stop the thread. Unless the mesh has failed, run ``last_check`` and publish what it finds for the others."""
        self.close()
        if self._thread.is_alive():
            return
        try:
            if self._first is None:
                report = self._request(lambda: last_check(self._store), self._store_timeout)
                if report is not None:
                    self._store.compare_set(self._key, "", report.to_text())
        except Exception as error:  # the store's host may have exited: then no rank waits
            logger.debug("could not announce to the store that this rank has closed: %s", error)
        self._store.close()  # even if the mesh is still referenced

    def _set_first(self, report: FailureReport) -> FailureReport:
        with self._lock:
            if self._first is not None:
                return self._first
            self._first = report
        self._poll_ended.set()
        atexit.register(_freeze)
        try:
            self._on_failure(report)
        finally:
            self._known.set()
            self._acknowledge()
        return report

    def _acknowledge(self) -> None:
        """Count this rank among those that know of the failure."""
        try:
            self._store.add(f"{self._key}/known", 1)
        except Exception as error:
            logger.debug("could not acknowledge a failure in the store: %s", error)

    def wait_acknowledged(self, num_ranks: int, seconds: float) -> None:
        """Wait until ``num_ranks`` ranks know of the failure, no more learn of it, or ``seconds`` have passed."""
        deadline = time.monotonic() + seconds
        known, since = 0, time.monotonic()
        try:
            while known < num_ranks and time.monotonic() < min(deadline, since + _IDLE_SECONDS):
                now = self._store.add(f"{self._key}/known", 0)
                known, since = (now, time.monotonic()) if now > known else (known, since)
                time.sleep(POLL_SECONDS / 2)
        except Exception as error:
            logger.debug("could not ask the store which ranks know of a failure: %s", error)

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            if self._first is not None and not self._closed.wait(_GRACE_SECONDS):
                self._force_abort()

    def _watch(self) -> None:
        lost_since: float | None = None
        refused_since: float | None = None
        while not self._poll_ended.wait(POLL_SECONDS):
            asked = time.monotonic()
            try:
                text = self._store.get(self._key) if self._store.check([self._key]) else None
                found = None if text is not None else self._run_health_checks()
            except _STORE_ERRORS as error:
                now = time.monotonic()
                lost_since, refused_since = lost_since or asked, refused_since or now
                silent = now - lost_since
                if silent >= self._store_timeout or now - refused_since > _STORE_ERROR_SECONDS:
                    self._store.shutdown()  # a late answer would be taken for that to the next request
                    lost = self._lost_text(silent) or _lost_text(silent, error)
                    self._set_first(self._own or FailureReport.of_unknown(lost))
                elif self._own is None and not self._store.renew() and self._store.may_return:
                    refused_since = None  # whoever publishes renews it or gives up
                continue
            self._on_answer(time.monotonic() - (lost_since or asked))
            lost_since = refused_since = None
            if text is not None:
                self._set_first(FailureReport.from_text(text))
            elif found is not None:
                self.publish(found)

    def _run_health_checks(self) -> FailureReport | None:
        found = (check(self._store) for check in self._health_checks)
        try:
            return next((report for report in found if report is not None), None)
        except _STORE_ERRORS:
            raise
        except Exception as error:
            logger.exception("a health check has failed")
            return FailureReport.of_unknown(
                f"a health check of a rank failed: {type(error).__name__}: {error}"
            )


def _lost_text(seconds: float, error: Exception) -> str:
    return (
        f"the store of the process group has not answered for {seconds:.0f} s: {error}. The process that hosts it, "
        "rank 0 of the world or the launcher, has probably exited or is unreachable: check its output and restart "
        "the job"
    )
