"""Slows lanes down: sends that read their tensors late, and messages that arrive late.

A held send starts when this rank waits for a message that does not arrive, or after some more sends on its
channel. Anything that the rank does in between may modify memory that is still to be sent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import Any

from ldt.runtime import Mesh
from ldt.runtime.comm.endpoint import Endpoint

__all__ = ["slow_lanes"]

_GRACE = 0.02  # seconds that a receive may take while sends are held
_HELD_SHARE = 0.35
_LATE_SHARE = 0.2
_LATE = 0.004


@contextmanager
def slow_lanes(mesh: Mesh, seed: int) -> Iterator[None]:
    """Hold or delay random messages of this rank, drawn from ``seed``."""
    plain = dict(mesh.endpoints)
    held = _Held(random.Random(seed))
    try:
        mesh.endpoints.update({channel: _SlowEnd(end, held) for channel, end in plain.items()})
        yield
    finally:
        mesh.endpoints.update({channel: end for channel, end in plain.items() if channel in mesh.endpoints})


class _Held:
    """The held sends of a rank, in order."""

    def __init__(self, numbers: random.Random) -> None:
        self.numbers = numbers
        self._waiting: list[_HeldSend] = []

    def hold(self, start: Callable[[], Any]) -> _HeldSend:
        send = _HeldSend(self, start)
        self._waiting.append(send)
        if len(self._waiting) == 1 and self.numbers.random() > _HELD_SHARE:
            self.start_all()
        return send

    def start_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for send in waiting:
            send.begin()

    def __bool__(self) -> bool:
        return bool(self._waiting)


class _HeldSend:
    """The part of ``dist.Work`` that the runtime uses."""

    def __init__(self, held: _Held, start: Callable[[], Any]) -> None:
        self._held, self._start = held, start
        self._began = False
        self._work: Any = None  # stays None if other ranks send the message

    def begin(self) -> None:
        self._work = self._start()
        self._began = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._began:
            self._held.start_all()
        if self._work is None:
            return True
        return bool(self._work.wait() if timeout is None else self._work.wait(timeout))

    def is_completed(self) -> bool:
        return self._began and (self._work is None or bool(self._work.is_completed()))


class _LateReceive:
    def __init__(self, held: _Held, work: Any) -> None:
        self._held, self._work = held, work
        self._seconds = _LATE if held.numbers.random() < _LATE_SHARE else 0.0

    def wait(self, timeout: timedelta | None = None) -> bool:
        end = time.monotonic() + _GRACE
        while self._held and not self._work.is_completed() and time.monotonic() < end:
            time.sleep(0.001)
        if self._held and not self._work.is_completed():
            self._held.start_all()
        done = bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        time.sleep(self._seconds)
        return done

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class _SlowEnd(Endpoint):
    def __init__(self, end: Endpoint, held: _Held) -> None:
        super().__init__(**{field.name: getattr(end, field.name) for field in fields(Endpoint)})
        self.__dict__.update(end=end, held=held)  # the class is frozen

    def send(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.stripes:
            return super().send(tensors, *args, **kwargs)
        return self.held.hold(lambda: self.end.send(tensors, *args, **kwargs))

    def receive(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return _LateReceive(self.held, self.end.receive(tensors, *args, **kwargs))
