"""How long does the host take to launch a message, and to wait for one, from Python?

Both ranks of a pair do the same at the same time: each posts a batch of receives, synchronizes with its peer, launches
as many sends, and waits for all of them. Every call is timed by itself. Devices are idle between batches, so no queue
is ever full. On a GPU a call that returns at once has only launched work; on the CPU ``wait`` includes the transfer.
``bounced`` is the share of messages that did not go directly into posted memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from bounces import Bounces
from clock import gather, high, meet, settle
from courier import Courier
from harness import Row, column, parse, parser, run
from p2p_paths import BothWays, P2pPaths
from picture import Picture
from transports import device_of

from ldt.cli.units import nbytes

CALLS = ("recv", "send", "wait")


@dataclass(frozen=True)
class CallRow:
    """One call of one path at one size."""

    PICTURE: ClassVar[Picture] = Picture("path", ("p50", "p99"), ("call", "size"))
    size: int = column("size", ">12")
    count: int = column("count", ">6")
    path: str = column("path", "<18")
    call: str = column("call", "<6")
    p50: float = column("p50 µs", ">10.2f")
    p99: float = column("p99 µs", ">10.2f")
    bounced: float | None = column("bounced", ">8.0%")
    wrong: int = column("#wrong", ">7")


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    device = device_of(arguments)
    with P2pPaths(arguments) as paths:
        for size in arguments.sizes:
            for path in paths:
                yield from rows_of(path, size, arguments, device)


def rows_of(
    path: BothWays, size: int, arguments: argparse.Namespace, device: torch.device
) -> Iterator[CallRow]:
    """Yield the slower rank's times; both ranks make equally many calls."""
    sides = [[Courier(way, size, device) for _ in range(arguments.batch)] for way in path]
    batch(sides, device)  # warm-up
    times: dict[str, list[float]] = {call: [] for call in CALLS}
    bounces = Bounces([lane for way in path for lane in way.receiving_lanes])
    bounces.start()
    for _ in range(-(-arguments.count // arguments.batch)):
        for call, found in batch(sides, device).items():
            times[call] += found
    bounces.stop()
    bounced = bounces.share()
    wrong = sum(courier.wrong() for couriers in sides for courier in couriers)
    for call, found in times.items():
        by_rank = gather(found)
        yield CallRow(
            size=size,
            count=len(found),
            path=path.name,
            call=call,
            p50=max(statistics.median(theirs) for theirs in by_rank) * 1e6,
            p99=max(high(theirs) for theirs in by_rank) * 1e6,
            bounced=bounced,
            wrong=wrong,
        )


def batch(sides: list[list[Courier]], device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of every call. Receives are posted in the order of the peer's sends."""
    incoming, outgoing = sorted(sides, key=lambda couriers: couriers[0].path.send is not None)
    both = incoming + outgoing
    for courier in both:
        courier.pack()
    settle(device)
    times = {"recv": [clocked(courier.post) for courier in incoming]}
    meet()
    times["send"] = [clocked(courier.start) for courier in outgoing]
    times["wait"] = [clocked(courier.wait) for courier in both]
    settle(device)
    for courier in both:
        courier.check()
    return times


def clocked(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--sizes", type=nbytes, nargs="+", default=[4 << 10, 1 << 20], help="per message: 4KiB, 1MiB"
    )
    options.add_argument("--count", type=int, default=200, help="calls for each row")
    options.add_argument(
        "--batch", type=int, default=20, help="messages each way before the devices are idle again"
    )
    options.add_argument("--pairs", type=int, default=1, help="pairs of ranks that do so at once")
    given = parse(options, lambda given: 2 * given.pairs, edge=lambda given: given.pairs)
    context = f"{given.pairs} pair(s) of ranks, both ways at once, in batches of {given.batch}"
    sys.exit(run(measure, given, context))
