"""A thread that alone calls a store, so that a call that waits for the network keeps nobody from hearing signals."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ldt.errors import LdtError
from ldt.launch.signals import Signals

__all__ = ["StoreThread", "first_line"]

_SLICE_SECONDS = 0.1  # between two looks for a signal
_T = TypeVar("_T")


class StoreThread:
    """Calls are made one after the other, each with the store that ``open`` has made."""

    def __init__(self, where: str, signals: Signals) -> None:
        self.store: Any = None
        self._where = where
        self._signals = signals
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()  # it may be in a call when the process ends

    def submit(self, call: Callable[[Any], _T]) -> Future[_T]:
        """Make a call later, and return its result or exception."""
        future: Future[_T] = Future()
        self._calls.put((future, call))
        return future

    def ask(self, call: Callable[[Any], _T], seconds: float, heed_signals: bool = True) -> _T:
        """Make a call and return its result.

        Raises LdtError if it fails or takes longer than ``seconds``, Interrupted if a signal comes meanwhile.
        """
        future, deadline = self.submit(call), time.monotonic() + seconds
        while not future.done():
            concurrent.futures.wait([future], _SLICE_SECONDS)
            if heed_signals:
                self._signals.check()
            if time.monotonic() > deadline:
                raise LdtError(f"the launchers' store at {self._where} did not answer within {seconds:g} s")
        return self.result(future)

    def result(self, future: Future[_T]) -> _T:
        """The result of a call that is done. Raises LdtError if it failed."""
        try:
            return future.result()
        except RuntimeError as error:  # DistError
            raise LdtError(
                f"the launchers' store at {self._where} is lost or unreachable: {first_line(error)}"
            ) from error

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            try:
                future.set_result(call(self.store))
            except BaseException as error:
                future.set_exception(error)


def first_line(error: BaseException) -> str:
    """The text of an error without the C++ stack that torch appends."""
    return str(error).partition("\n")[0]
