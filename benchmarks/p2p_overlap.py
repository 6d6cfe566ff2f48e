"""How much of a transfer between two GPUs hides behind compute, and what does it cost the compute?

A message goes from each lower rank to the upper rank of its pair beside GEMMs on both. Three things take turns, each
from idle devices and after a barrier on the host: the transfer alone, the GEMMs alone, and both: transfer launched,
GEMMs launched, transfer waited for. (Without turns the later one is slower by itself: GEMMs run at the limit of power.)
Times are those of the current stream, from before the launch to after the wait; on the CPU those of the host.

- ``hidden``    (gemms + alone - both) / min(gemms, alone): 100 % is all of the transfer, or all of the GEMMs
- ``slowdown``  both / gemms - 1

Each is taken from a rank's medians, and the table has the median over ranks; those of every rank are in the JSON file.
``plain peer copy`` is one process that copies from its GPU to the next: what the link can do.

The second table is the time of one message from post to use: the receive is posted first, then ranks meet, then the
sender sends; until the receiver's current stream is done with the wait. The slowest rank counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from clock import Stopwatch, gather, high, median_of, meet, settle, slowest
from courier import Courier
from gemms import LOADS, Gemms
from harness import Row, column, parse, parser, run
from p2p_paths import BothWays, P2pPaths
from picture import Picture
from transports import device_of, note

from ldt.cli.units import nbytes
from ldt.runtime.device import synchronize_current_stream

WARM_UP = 3
SIZE = {"cuda": 256 << 20, "cpu": 4 << 20}
LATENCY_SIZES = {
    "cuda": [4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20],
    "cpu": [4 << 10, 64 << 10, 1 << 20],
}


@dataclass(frozen=True)
class OverlapRow:
    """One path beside one load."""

    PICTURE: ClassVar[Picture] = Picture("path", ("hidden", "slowdown", "gigabytes_per_second"), ("load",))
    size: int = column("size", ">12")
    count: int = column("count", ">6")
    path: str = column("path", "<18")
    load: str | None = column("gemms", "<18")
    alone: float = column("alone µs", ">10.1f")
    compute: float | None = column("gemms µs", ">10.1f")
    both: float | None = column("both µs", ">10.1f")
    gigabytes_per_second: float = column("GB/s", ">7.1f")
    hidden: float | None = column("hidden", ">7.1%")
    slowdown: float | None = column("slowdown", ">8.1%")
    wrong: int = column("#wrong", ">7")
    by_rank: tuple[dict[str, float], ...] = ()


@dataclass(frozen=True)
class LatencyRow:
    """One path at one size, without load."""

    PICTURE: ClassVar[Picture] = Picture("size", ("p50",), ("path",))
    size: int = column("size", ">12")
    count: int = column("count", ">6")
    path: str = column("path", "<18")
    p50: float = column("p50 µs", ">10.1f")
    p99: float = column("p99 µs", ">10.1f")
    gigabytes_per_second: float = column("GB/s", ">7.2f")
    wrong: int = column("#wrong", ">7")


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    device = device_of(arguments)
    size = arguments.size or SIZE[arguments.device]
    with P2pPaths(arguments) as paths:
        for kind in LOADS[arguments.device]:
            load = Gemms(replace(kind, count=arguments.gemms or kind.count), device)
            for path in paths:
                yield overlap(path, size, load, arguments.count, device)
        if device.type == "cuda":
            yield from peer_copy(size, arguments.count)
        for size in arguments.latency_sizes or LATENCY_SIZES[arguments.device]:
            for path in paths:
                yield latency(path, size, arguments.latency_count, device)


# -- overlap -----------------------------------------------------------------------------------------------------


def overlap(path: BothWays, size: int, load: Gemms, count: int, device: torch.device) -> OverlapRow:
    courier = Courier(path.up, size, device)
    samples = [
        (timed(device, courier), timed(device, load=load), timed(device, courier, load))
        for _ in range(WARM_UP + count)
    ][WARM_UP:]
    by_rank = tuple(figures(*times) for times in gather(median_of(samples)))
    alone, compute, both, hidden, slowdown = median_of([tuple(rank.values()) for rank in by_rank])
    return OverlapRow(
        size=size,
        count=count,
        path=path.name,
        load=load.kind.name,
        alone=alone,
        compute=compute,
        both=both,
        gigabytes_per_second=size / alone / 1e3,
        hidden=hidden,
        slowdown=slowdown,
        wrong=courier.wrong(),
        by_rank=by_rank,
    )


def timed(device: torch.device, courier: Courier | None = None, load: Gemms | None = None) -> float:
    """Seconds for what is given, from idle devices.

    The start is recorded before the launch: a lane's stream waits for what was on the current stream by then, or
    begins later, since that stream is idle.
    """
    watch = Stopwatch(device)
    if courier is not None:
        courier.pack()
    settle(device)
    watch.start()
    wait = courier.start() if courier is not None else None
    if load is not None:
        load()
    if wait is not None:
        wait()
    seconds = watch.stop()
    if courier is not None:
        courier.check()
    return seconds


def figures(alone: float, compute: float, both: float) -> dict[str, float]:
    """Of one rank: its medians in µs, and what follows from them."""
    return {
        "alone": alone * 1e6,
        "compute": compute * 1e6,
        "both": both * 1e6,
        "hidden": (compute + alone - both) / min(compute, alone),
        "slowdown": both / compute - 1,
    }


def peer_copy(size: int, count: int) -> Iterator[OverlapRow]:
    """Rank 0 copies from its GPU to that of rank 1, which waits meanwhile."""
    if not torch.cuda.can_device_access_peer(0, 1):
        note("plain peer copy is left out: GPU 0 cannot access the memory of GPU 1")
        return
    took, wrong = 0.0, 0
    if dist.get_rank() == 0:
        source = torch.arange(size // 4, dtype=torch.int32, device="cuda:0")
        target = torch.empty_like(source, device="cuda:1")
        watch, times = Stopwatch(source.device), []
        for _ in range(WARM_UP + count):
            torch.cuda.synchronize(0)
            watch.start()
            target.copy_(source, non_blocking=True)
            times.append(watch.stop())
        took = statistics.median(times[WARM_UP:])
        wrong = int((target.cpu() != source.cpu()).sum())
        del target
        torch.cuda.empty_cache()
    took, all_wrong = slowest([took, float(wrong)])
    yield OverlapRow(
        size=size,
        count=count,
        path="plain peer copy",
        load=None,
        alone=took * 1e6,
        compute=None,
        both=None,
        gigabytes_per_second=size / took / 1e9,
        hidden=None,
        slowdown=None,
        wrong=int(all_wrong),
    )


# -- latency -----------------------------------------------------------------------------------------------------


def latency(path: BothWays, size: int, count: int, device: torch.device) -> LatencyRow:
    courier = Courier(path.up, size, device)
    times = slowest([one_way(courier, device) for _ in range(WARM_UP + count)][WARM_UP:])
    median = statistics.median(times)
    return LatencyRow(
        size=size,
        count=count,
        path=path.name,
        p50=median * 1e6,
        p99=high(times) * 1e6,
        gigabytes_per_second=size / median / 1e9,
        wrong=courier.wrong(),
    )


def one_way(courier: Courier, device: torch.device) -> float:
    """Seconds on the host of this rank, from the meeting on."""
    courier.pack()
    settle(device)
    wait: Any = courier.start() if courier.path.receives else None
    meet()
    start = time.perf_counter()
    if courier.path.sends:
        wait = courier.start()
    wait()
    synchronize_current_stream(device)
    seconds = time.perf_counter() - start
    courier.check()
    return seconds


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--size", type=nbytes, help="of a message beside GEMMs; default: 256MiB on GPUs")
    options.add_argument("--count", type=int, default=15, help="turns that count for each row")
    options.add_argument("--gemms", type=int, help="GEMMs of each load instead of the default")
    options.add_argument(
        "--latency-sizes", type=nbytes, nargs="*", help="4KiB, 16MiB; default: up to 256MiB on GPUs"
    )
    options.add_argument("--latency-count", type=int, default=50, help="messages for each row of latency")
    options.add_argument("--pairs", type=int, default=1, help="pairs of ranks that do so at once")
    given = parse(options, lambda given: 2 * given.pairs)
    context = f"{given.pairs} pair(s) of ranks, one way; {WARM_UP} turns for each row are not counted"
    sys.exit(run(measure, given, context))
