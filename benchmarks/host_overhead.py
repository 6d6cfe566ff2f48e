"""How long does the host take to launch a message, and to wait for one, from Python?

Both ranks of a pair do the same at the same time: each posts a batch of receives, launches as many sends and waits for
all. Every call is timed alone. Between batches devices are idle, so that no queue is ever full. On a GPU a call that
returns at once has only launched; on the CPU ``wait`` is the transfer, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from clock import gather, high, settle
from courier import Courier
from harness import Row, column, parse, parser, run
from p2p_paths import BothWays, P2pPaths
from picture import Picture
from transports import device_of

from ldt.cli.units import nbytes

Result = TypeVar("Result")
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
    """The slower rank's figures; both have as many calls."""
    sides = [[Courier(way, size, device) for _ in range(arguments.batch)] for way in path]
    batch(sides, device)  # connects, and does not count
    times: dict[str, list[float]] = {call: [] for call in CALLS}
    for _ in range(-(-arguments.count // arguments.batch)):
        for call, found in batch(sides, device).items():
            times[call] += found
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
            wrong=wrong,
        )


def batch(sides: list[list[Courier]], device: torch.device) -> dict[str, list[float]]:
    """Seconds of every call. Receives are posted first, in the order of the other side's sends."""
    incoming, outgoing = sorted(sides, key=lambda couriers: couriers[0].path.sends)
    for courier in incoming + outgoing:
        courier.pack()
    settle(device)
    receives = [clocked(courier.start) for courier in incoming]
    sends = [clocked(courier.start) for courier in outgoing]
    waits = [clocked(wait) for _, wait in receives + sends]
    settle(device)
    for courier in incoming + outgoing:
        courier.check()
    return {
        "recv": [seconds for seconds, _ in receives],
        "send": [seconds for seconds, _ in sends],
        "wait": [seconds for seconds, _ in waits],
    }


def clocked(call: Callable[[], Result]) -> tuple[float, Result]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


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
    given = parse(options, lambda given: 2 * given.pairs)
    context = f"{given.pairs} pair(s) of ranks, both ways at once, in batches of {given.batch}"
    sys.exit(run(measure, given, context))
