"""Simulates a slow link on one machine by delaying arrivals on a mesh's channels by a latency.

A message starts when it was sent, its receive was posted, and the previous message on its channel started, whichever
is last. This is the simulator's rule for a link of unlimited bandwidth. Each message carries the time it was sent.
"""

from __future__ import annotations

import time
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch

from ldt.runtime import Mesh
from ldt.runtime.comm.endpoint import Endpoint, Parts

__all__ = ["delay"]


def delay(mesh: Mesh, seconds: float) -> None:
    """Delay every further message of ``mesh`` by ``seconds``. Call it on all ranks, between steps."""
    for channel, end in mesh.endpoints.items():
        mesh.endpoints[channel] = _DelayedEnd(end, seconds)


class _DelayedEnd(Endpoint):
    def __init__(self, end: Endpoint, seconds: float) -> None:
        super().__init__(**{field.name: getattr(end, field.name) for field in fields(Endpoint)})
        self.__dict__.update(end=end, seconds=seconds, last_start=0.0)  # the class is frozen

    def send_parts(self, parts: Parts, label: str) -> Any:
        sent = torch.tensor([time.time()], dtype=torch.float64)
        return super().send_parts({stripe: [sent, *part] for stripe, part in parts.items()}, label)

    def receive_parts(self, parts: Parts, label: str) -> Any:
        sent = {stripe: torch.zeros(1, dtype=torch.float64) for stripe in parts}
        work = super().receive_parts({stripe: [sent[stripe], *part] for stripe, part in parts.items()}, label)
        return _DelayedWork(work, list(sent.values()), self.__dict__)


class _DelayedWork:
    """The part of ``dist.Work`` that the runtime uses."""

    def __init__(self, work: Any, sent: list[torch.Tensor], link: dict[str, Any]) -> None:
        self._work, self._sent, self._link = work, sent, link
        self._posted = time.time()
        self._arrival: float | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait() if timeout is None else self._work.wait(timeout)
        time.sleep(max(0.0, self._arrives() - time.time()))
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed()) and time.time() >= self._arrives()

    def _arrives(self) -> float:
        if self._arrival is None:
            start = max(*map(float, self._sent), self._posted, self._link["last_start"])
            self._link["last_start"] = start
            self._arrival = start + self._link["seconds"]
        return self._arrival
