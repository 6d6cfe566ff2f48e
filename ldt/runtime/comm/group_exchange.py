"""Creates many gloo groups at once: what they tell each other goes to the store and back together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from ldt._torch_private import Store
from ldt.errors import LdtError
from ldt.runtime.common.peer_messages import read_or_raise

__all__ = ["GroupExchange", "GroupRequest", "Swap", "make_together"]

_POLL_SECONDS = 0.1
_END_SECONDS = 5.0


class GroupRequest(NamedTuple):
    """A group to create: its name in the mesh, its key in the store, its global ranks and its backend."""

    name: str
    key: str
    ranks: Sequence[int]
    backend: str


class GroupExchange(Store):
    """The store of one group while a thread creates it: gloo sets its addresses and waits for those of other ranks.

    The thread then waits until another one calls ``receive`` or ``end``.
    """

    def __init__(self, request: GroupRequest, asking: SimpleQueue[Any]) -> None:
        super().__init__()
        self.ranks = request.ranks
        self.key = request.key
        self.rounds = 0  # one is enough unless torch checks its collectives (TORCH_DISTRIBUTED_DEBUG)
        self.announced: dict[str, str] = {}  # in hex
        self._known: dict[str, bytes] = {}
        self._asking = asking
        self._answers: SimpleQueue[Mapping[str, bytes] | None] = SimpleQueue()

    def set(self, key: str, value: Any) -> None:
        self.announced[key] = value.hex()

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def get(self, key: str) -> bytes:
        if key not in self._known:
            self._asking.put(self)
            answer = self._answers.get()
            if answer is None:
                self.end()  # also the next wait
                raise LdtError(f"group {self.key} gets no more addresses: another group was not created")
            self._known.update(answer)
        if key not in self._known:
            raise LdtError(
                f"the ranks of group {self.key} did not announce {key!r}: check that all run the same version of torch"
            )
        return self._known[key]

    def receive(self, announced: Sequence[Mapping[str, str]]) -> None:
        """Give the waiting thread what each rank of the group announced. Raises LdtError naming one for other data."""
        values: dict[str, bytes] = {}
        for rank, texts in zip(self.ranks, announced, strict=True):
            values |= read_or_raise(texts, _from_hex, f"connect: rank {rank}")
        self.announced = {}
        self.rounds += 1
        self._answers.put(values)

    def end(self) -> None:
        """Make the thread raise when it waits."""
        self._answers.put(None)


def _from_hex(texts: Mapping[str, str]) -> dict[str, bytes]:
    return {name: bytes.fromhex(text) for name, text in texts.items()}


Swap = Callable[[Sequence[GroupExchange]], None]
"""Sends the other ranks what the exchanges have ``announced`` and lets each ``receive`` what its ranks announced."""


def make_together(
    requests: Sequence[GroupRequest],
    make: Callable[[GroupRequest, Store], None],
    swap: Swap,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Call ``make`` for all requests at once, each with a store, and ``swap`` when all that still run wait for it.

    Raises the first error, of a call, of ``swap`` or of ``check``, which is called often. Calls that have not ended 5 s
    later, or at an interrupt, are left to their threads: gloo has no way to stop before its timeout.
    """
    events: SimpleQueue[Any] = SimpleQueue()  # an exchange that waits, or the future of a call that has ended
    exchanges = [GroupExchange(request, events) for request in requests]
    threads = []
    try:
        for request, exchange in zip(requests, exchanges, strict=True):
            call: Future[None] = Future()
            call.add_done_callback(events.put)
            threads.append(Thread(target=_call, args=(call, make, request, exchange), daemon=True))
            threads[-1].start()
        _serve(events, len(threads), swap, check)
    except BaseException as error:
        _end(exchanges, threads, _END_SECONDS if isinstance(error, Exception) else 0.0)
        raise
    _end(exchanges, threads, _END_SECONDS)


def _serve(events: SimpleQueue[Any], running: int, swap: Swap, check: Callable[[], None]) -> None:
    """Call ``swap`` whenever all calls that are ``running`` wait for it, until none is. Raises the error of one."""
    waiting: list[GroupExchange] = []
    while running:
        try:
            event = events.get(timeout=_POLL_SECONDS)
        except Empty:
            check()
            continue
        if isinstance(event, GroupExchange):
            waiting.append(event)
        else:
            event.result()
            running -= 1
        if waiting and len(waiting) == running:
            swap(waiting)
            waiting = []


def _call(
    call: Future[None], make: Callable[[GroupRequest, Store], None], request: GroupRequest, store: Store
) -> None:
    try:
        make(request, store)
        call.set_result(None)
    except BaseException as error:
        call.set_exception(error)


def _end(exchanges: Sequence[GroupExchange], threads: Sequence[Thread], seconds: float) -> None:
    """No exchange waits any more; wait for ``threads``."""
    for exchange in exchanges:
        exchange.end()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
