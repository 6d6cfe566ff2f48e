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
    """A barrier on the host: over gloo, so that no device has a part in it."""
    dist.all_reduce(torch.zeros(1))


def settle(device: torch.device) -> None:
    """Wait for all that was launched on the device, then for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    meet()


def gather(values: Sequence[float]) -> list[list[float]]:
    """The values of each rank, which gives as many as any other."""
    mine = torch.tensor(values, dtype=torch.float64)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return [tensor.tolist() for tensor in theirs]


def slowest(values: Sequence[float]) -> list[float]:
    """Element by element, the largest value over all ranks."""
    return [max(column) for column in zip(*gather(values), strict=True)]


def total(number: int) -> int:
    """The sum over all ranks."""
    return int(sum(values[0] for values in gather([float(number)])))


class Passage(NamedTuple):
    """When this rank began to send a message, and when it had received it; infinitely late or early if it did not.

    Moments of time.perf_counter, which is one clock for all processes of a host (CLOCK_MONOTONIC).
    """

    sent: float
    received: float

    @classmethod
    def of(cls, sent: float | None, received: float | None) -> Passage:
        return cls(math.inf if sent is None else sent, -math.inf if received is None else received)


def durations(passages: Sequence[Passage], routes: Sequence[Sequence[int]] | None = None) -> list[float]:
    """Of each message the seconds from the first rank's start to the last one's end.

    ``routes`` are the ranks of each of several messages at once, of which the slowest counts; by default there is one,
    of all ranks.
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
    """The 99th percentile; below 100 values the largest."""
    return sorted(times)[max(0, round(0.99 * len(times)) - 1)] if len(times) >= 100 else max(times)


class Stopwatch:
    """Seconds from ``start`` to ``stop``: on a GPU those of the current stream, on the CPU those of the host."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        self._marks.clear()
        self.split()

    def split(self) -> None:
        """A moment in between, which ``stop_split`` counts from; nothing waits for it."""
        if not self._is_cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def stop(self) -> float:
        """Waits on the host until what was launched since is done."""
        self.split()
        return self._between(0, -1)

    def stop_split(self) -> tuple[float, float]:
        """As ``stop``, and the seconds since the last ``split``."""
        return self.stop(), self._between(-2, -1)

    def _between(self, first: int, last: int) -> float:
        if not self._is_cuda:
            return float(self._marks[last] - self._marks[first])
        self._marks[last].synchronize()
        return float(self._marks[first].elapsed_time(self._marks[last])) / 1e3


def median_of(samples: Sequence[Sequence[float]]) -> list[float]:
    """Column by column."""
    return [statistics.median(column) for column in zip(*samples, strict=True)]
