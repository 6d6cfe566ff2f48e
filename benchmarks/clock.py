"""Taking the time on several ranks: all start together from idle devices, and the slowest counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Stopwatch", "gather", "high", "median_of", "meet", "settle", "slowest", "total"]


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


def high(times: Sequence[float]) -> float:
    """The 99th percentile; below 100 values the largest."""
    return sorted(times)[max(0, round(0.99 * len(times)) - 1)] if len(times) >= 100 else max(times)


class Stopwatch:
    """Seconds from ``start`` to ``stop``: on a GPU those of the current stream, on the CPU those of the host."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[Any] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._start = 0.0

    def start(self) -> None:
        if self._events:
            self._events[0].record()
        else:
            self._start = time.perf_counter()

    def stop(self) -> float:
        """Waits on the host until what was launched since is done."""
        if not self._events:
            return time.perf_counter() - self._start
        self._events[1].record()
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


def median_of(samples: Sequence[Sequence[float]]) -> list[float]:
    """Column by column."""
    return [statistics.median(column) for column in zip(*samples, strict=True)]
