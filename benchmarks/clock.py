"""Measures time on several ranks of one host: all start together from idle devices, and the slowest counts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = [
    "Passage",
    "Stopwatch",
    "durations",
    "gather",
    "high",
    "median_of",
    "meet",
    "settle",
    "slowest",
    "total",
]


def meet() -> None:
    """Wait for all ranks on the host, over gloo, so that no device takes part."""
    dist.all_reduce(torch.zeros(1))


def settle(device: torch.device) -> None:
    """Synchronize the device, then wait for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    meet()


def gather(values: Sequence[float]) -> list[list[float]]:
    """Gather the values of all ranks, each of which gives equally many."""
    mine = torch.tensor(values, dtype=torch.float64)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return [tensor.tolist() for tensor in theirs]


def slowest(values: Sequence[float]) -> list[float]:
    """Return the elementwise maximum over all ranks."""
    return [max(column) for column in zip(*gather(values), strict=True)]


def total(number: int) -> int:
    """Return the sum over all ranks."""
    return int(sum(values[0] for values in gather([float(number)])))


class Passage(NamedTuple):
    """When this rank started to send a message and when it had received it, as readings of time.perf_counter.

    All processes of a host share that clock (CLOCK_MONOTONIC). A rank that did not send starts infinitely late; one
    that did not receive ends infinitely early.
    """

    sent: float
    received: float

    @classmethod
    def of(cls, sent: float | None, received: float | None) -> Passage:
        return cls(math.inf if sent is None else sent, -math.inf if received is None else received)


def durations(passages: Sequence[Passage], routes: Sequence[Sequence[int]] | None = None) -> list[float]:
    """Return for each message the seconds from the first rank's start to the last rank's end.

    ``routes`` lists the ranks of each of several concurrent messages, of which the slowest counts; by default there is
    one message for all ranks.
    """
    sent, received = (gather(moments) for moments in zip(*passages, strict=True))
    routes = routes or [range(len(sent))]
    return [
        max(
            max(received[rank][index] for rank in route) - min(sent[rank][index] for rank in route)
            for route in routes
        )
        for index in range(len(passages))
    ]


def high(times: Sequence[float]) -> float:
    """Return the 99th percentile; with fewer than 100 values, the largest."""
    return sorted(times)[max(0, round(0.99 * len(times)) - 1)] if len(times) >= 100 else max(times)


class Stopwatch:
    """Measures seconds from ``start`` to ``stop``: of the current stream on a GPU, of the host on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        self._marks.clear()
        self.split()

    def split(self) -> None:
        """Record the point from which ``stop_split`` measures; nothing waits for it."""
        if not self._is_cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def stop(self) -> float:
        """Wait on the host for all work launched since ``start``, and return the seconds it took."""
        self.split()
        return self._between(0, -1)

    def stop_split(self) -> tuple[float, float]:
        """Like ``stop``, and also return the seconds since the last ``split``."""
        return self.stop(), self._between(-2, -1)

    def _between(self, first: int, last: int) -> float:
        if not self._is_cuda:
            return float(self._marks[last] - self._marks[first])
        self._marks[last].synchronize()
        return float(self._marks[first].elapsed_time(self._marks[last])) / 1e3


def median_of(samples: Sequence[Sequence[float]]) -> list[float]:
    """Return the medians of the columns."""
    return [statistics.median(column) for column in zip(*samples, strict=True)]
