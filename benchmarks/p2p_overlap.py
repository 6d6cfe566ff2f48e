"""How much of a transfer between two GPUs hides behind compute, and what does it cost the compute?

Each lower rank sends a message to the upper rank of its pair while both run GEMMs. Three measurements alternate, each
from idle devices: the transfer alone, the GEMMs alone, and both. As in a pipeline, the receive is posted first; then
the ranks synchronize on the host, the transfer and the GEMMs are launched, and the transfer is waited for. The longer
GEMMs run, the slower they are, as they reach the power limit: so some that are not timed come first, and those alone
are measured before and after both. Times are those of the current stream,
from before the launch to after the wait; on the CPU those of the host.

- ``hidden``    (gemms + alone - both) / min(gemms, alone): 100 % if all of the transfer or all of the GEMMs is hidden
- ``slowdown``  both / gemms - 1
- ``bounced``   share of the messages that did not go directly into posted memory

Each value is computed from a rank's medians. The table shows the median over ranks; the JSON file has every rank's.
The second table, latency and bandwidth without load, is explained in p2p_latency.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from clock import Stopwatch, gather, median_of, settle
from courier import Courier
from gemms import LOADS, Gemms
from harness import Row, column, parse, parser, run
from p2p_latency import latencies
from p2p_paths import BothWays, P2pPaths
from picture import Picture
from transports import device_of

from ldt.cli.units import nbytes

WARM_UP = 3
SIZE = {"cuda": 256 << 20, "cpu": 4 << 20}
LATENCY_SIZES = {
    "cuda": [4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20],
    "cpu": [4 << 10, 64 << 10, 1 << 20],
}


@dataclass(frozen=True)
class OverlapRow:
    """One path with one load."""

    PICTURE: ClassVar[Picture] = Picture("path", ("hidden", "slowdown"), ("load",))
    size: int = column("size", ">12")
    count: int = column("count", ">6")
    path: str = column("path", "<18")
    load: str = column("gemms", "<18")
    alone: float = column("alone µs", ">10.1f")
    compute: float = column("gemms µs", ">10.1f")
    both: float = column("both µs", ">10.1f")
    hidden: float = column("hidden", ">7.1%")
    slowdown: float = column("slowdown", ">8.1%")
    bounced: float | None = column("bounced", ">8.0%")
    wrong: int = column("#wrong", ">7")
    by_rank: tuple[dict[str, float], ...] = ()


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    device = device_of(arguments)
    size = arguments.size or SIZE[arguments.device]
    with P2pPaths(arguments) as paths:
        for kind in LOADS[arguments.device]:
            load = Gemms(replace(kind, count=arguments.gemms or kind.count), device)
            for path in paths:
                yield overlap(path, size, load, arguments.count, device)
        sizes = arguments.latency_sizes or LATENCY_SIZES[arguments.device]
        yield from latencies(paths, sizes, arguments.latency_count, device)


def overlap(path: BothWays, size: int, load: Gemms, count: int, device: torch.device) -> OverlapRow:
    courier = Courier(path.up, size, device)
    samples = [turn(courier, load, device) for _ in range(WARM_UP + count)][WARM_UP:]
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
        hidden=hidden,
        slowdown=slowdown,
        bounced=courier.bounced(),
        wrong=courier.wrong(),
        by_rank=by_rank,
    )


def turn(courier: Courier, load: Gemms, device: torch.device) -> tuple[float, float, float]:
    """Return the seconds of the transfer alone, of the GEMMs alone, and of both."""
    alone = timed(device, courier)
    load()
    before, both, after = timed(device, load=load), timed(device, courier, load), timed(device, load=load)
    return alone, (before + after) / 2, both


def timed(device: torch.device, courier: Courier | None = None, load: Gemms | None = None) -> float:
    """Return the seconds of the given work, from idle devices.

    The start is recorded before the launch: a lane's stream waits for earlier work on the current stream, or begins
    later, since that stream is idle.
    """
    watch = Stopwatch(device)
    if courier is None:
        settle(device)
    else:
        courier.ready()
    watch.start()
    if courier is not None:
        courier.start()
    if load is not None:
        load()
    if courier is not None:
        courier.wait()
    seconds = watch.stop()
    if courier is not None:
        courier.check()
    return seconds


def figures(alone: float, compute: float, both: float) -> dict[str, float]:
    """One rank's medians in µs, and the values derived from them."""
    return {
        "alone": alone * 1e6,
        "compute": compute * 1e6,
        "both": both * 1e6,
        "hidden": (compute + alone - both) / min(compute, alone),
        "slowdown": both / compute - 1,
    }


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
    given = parse(options, lambda given: 2 * given.pairs, edge=lambda given: given.pairs)
    context = f"{given.pairs} pair(s) of ranks, one way; {WARM_UP} turns for each row are not counted"
    sys.exit(run(measure, given, context))
