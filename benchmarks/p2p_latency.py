"""How long does a message between two idle GPUs take, and how close is it to the speed of the link?

The receive is posted first, then the ranks synchronize, then the sender sends. The time runs from there until the
receiver's current stream has passed the wait, measured on the host, whose clock all ranks share. With several pairs,
the slowest counts.

``plain peer copy`` is one process that copies from its GPU to the next, from the launch until its stream is done.
``of copy`` is the bandwidth relative to that copy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from clock import durations, high, settle, slowest, total
from courier import Courier
from harness import column
from p2p_paths import BothWays
from picture import Picture
from transports import note

from ldt.runtime.common.device import synchronize_current_stream

__all__ = ["LatencyRow", "latencies"]

WARM_UP = 3


@dataclass(frozen=True)
class LatencyRow:
    """One path at one size."""

    PICTURE: ClassVar[Picture] = Picture("size", ("p50",), ("path",))
    size: int = column("size", ">12")
    count: int = column("count", ">6")
    path: str = column("path", "<18")
    p50: float = column("p50 µs", ">10.1f")
    p99: float = column("p99 µs", ">10.1f")
    gigabytes_per_second: float = column("GB/s", ">7.2f")
    of_copy: float | None = column("of copy", ">8.3f")
    bounced: float | None = column("bounced", ">8.0%")
    wrong: int = column("#wrong", ">7")


def latencies(
    paths: Sequence[BothWays], sizes: Sequence[int], count: int, device: torch.device
) -> Iterator[LatencyRow]:
    can_copy = device.type == "cuda" and torch.cuda.can_device_access_peer(0, 1)
    if device.type == "cuda" and not can_copy:
        note("plain peer copy is left out: GPU 0 cannot access the memory of GPU 1")
    for size in sizes:
        copy = peer_copy(size, count) if can_copy else None
        if copy is not None:
            yield copy
        for path in paths:
            yield latency(path, size, count, device, copy)


def latency(
    path: BothWays, size: int, count: int, device: torch.device, copy: LatencyRow | None
) -> LatencyRow:
    courier = Courier(path.up, size, device)
    pairs = dist.get_world_size() // 2
    routes = [(lower, lower + pairs) for lower in range(pairs)]
    times = durations([courier.carry() for _ in range(WARM_UP + count)][WARM_UP:], routes)
    return row_of(path.name, size, times, copy, courier.bounced(), courier.wrong())


def row_of(
    path: str, size: int, times: Sequence[float], copy: LatencyRow | None, bounced: float | None, wrong: int
) -> LatencyRow:
    median = statistics.median(times)
    return LatencyRow(
        size=size,
        count=len(times),
        path=path,
        p50=median * 1e6,
        p99=high(times) * 1e6,
        gigabytes_per_second=size / median / 1e9,
        of_copy=None if copy is None else copy.p50 / (median * 1e6),
        bounced=bounced,
        wrong=wrong,
    )


def peer_copy(size: int, count: int) -> LatencyRow:
    """Copy from rank 0's GPU to rank 1's, while rank 1 waits."""
    times, wrong = [0.0] * count, 0
    settle(torch.device("cuda", dist.get_rank()))
    if dist.get_rank() == 0:
        source = torch.arange(size // 4, dtype=torch.int32, device="cuda:0")
        target = torch.empty_like(source, device="cuda:1")
        times = [timed_copy(source, target) for _ in range(WARM_UP + count)][WARM_UP:]
        wrong = int((target.cpu() != source.cpu()).sum())
        del target
        torch.cuda.empty_cache()  # the memory of another rank's GPU
    return row_of("plain peer copy", size, slowest(times), None, None, total(wrong))


def timed_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    """Copy different data than the last time."""
    source += 1
    torch.cuda.synchronize(source.device)
    start = time.perf_counter()
    target.copy_(source, non_blocking=True)
    synchronize_current_stream(source.device)
    return time.perf_counter() - start
