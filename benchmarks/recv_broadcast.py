"""What does the broadcast inside the stage add to a receive, and how much of both does compute hide?

Rank 0 sends to a stage of ``--stage`` ranks that rank 1 leads; with ``--two-ranks``, and by itself on two GPUs, rank 0
is a member of the stage, too. Paths:

- ``receive alone``  the bare receive on the leader, without any broadcast: the floor
- ``hand-made``      irecv, and in its wait a broadcast, as code without lanes does: the baseline
- ``fused, ...``     one lane over that transport, whose broadcast runs behind the receive; with ``--chunk-bytes`` also
                     lanes over process groups with pieces of those sizes

``p50`` and ``p99`` are from launch to end without other work, on the host. For ``exposed``, compute of about twice the
bare receive is launched before the wait. On a GPU that is GEMMs, and exposed is how much longer the compute stream
takes with the message than without. On the CPU it is a sleep (compute on an accelerator leaves the host's cores free)
of twice the slowest path, and exposed is the time blocked in the wait. ``share`` is exposed over p50. The slowest rank
counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from clock import Stopwatch, high, settle, slowest
from courier import Courier
from gemms import LOADS, Gemms
from harness import Row, column, parse, parser, run
from picture import Picture
from stage_paths import stage_paths
from transports import device_of

from ldt.cli.units import nbytes

SIZES = {
    "cuda": [1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20],
    "cpu": [64 << 10, 1 << 20, 16 << 20, 64 << 20],
}
Compute = Callable[[], object]


@dataclass(frozen=True)
class MessageRow:
    """One path at one size."""

    PICTURE: ClassVar[Picture] = Picture("size", ("p50", "exposed"), ("path",))
    size: int = column("size", ">12")
    stage: int = column("stage", ">6")
    count: int = column("count", ">6")
    path: str = column("path", "<20")
    p50: float = column("p50 µs", ">10.1f")
    p99: float = column("p99 µs", ">10.1f")
    over_receive: float = column("over receive", ">12.2f")
    exposed: float = column("exposed µs", ">11.1f")
    share: float = column("share", ">7.1%")
    gigabytes_per_second: float = column("GB/s", ">7.2f")
    wrong: int = column("#wrong", ">7")


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    device = device_of(arguments)
    with stage_paths(arguments) as paths:
        gemms = Gemms(LOADS["cuda"][0], device) if device.type == "cuda" else None
        gemm = slowest([gemms.time_of_one()])[0] if gemms else 0.0
        for size in arguments.sizes or SIZES[arguments.device]:
            couriers = [Courier(path, size, device) for path in paths]
            direct = [slowest([courier.carry() for _ in range(5)]) for courier in couriers]
            compute: Compute
            if gemms is not None:
                gemms.kind = replace(gemms.kind, count=max(2, round(2 * min(direct[0]) / gemm)))
                compute = gemms
            else:
                compute = Sleep(2 * max(min(times) for times in direct))
            yield from rows_of(size, couriers, compute, arguments, device)


@dataclass
class Sleep:
    """What compute on an accelerator is to the host."""

    seconds: float

    def __call__(self) -> None:
        time.sleep(self.seconds)


def rows_of(
    size: int,
    couriers: Sequence[Courier],
    compute: Compute,
    arguments: argparse.Namespace,
    device: torch.device,
) -> Iterator[MessageRow]:
    """Paths take turns, so that what else the machine does hits all of them alike."""
    times: list[list[float]] = [[] for _ in couriers]
    exposures: list[list[float]] = [[] for _ in couriers]
    exposed = exposed_on_stream if device.type == "cuda" else exposed_on_host
    for _ in range(arguments.count):
        for courier, took, showed in zip(couriers, times, exposures, strict=True):
            took.append(courier.carry())
            showed.append(exposed(courier, compute, device))
    receive = statistics.median(slowest(times[0]))
    for courier, mine, showed in zip(couriers, times, exposures, strict=True):
        took = slowest(mine)
        median, left = statistics.median(took), max(0.0, statistics.median(slowest(showed)))
        yield MessageRow(
            size=size,
            stage=arguments.stage,
            count=len(took),
            path=courier.path.name,
            p50=median * 1e6,
            p99=high(took) * 1e6,
            over_receive=median / receive,
            exposed=left * 1e6,
            share=left / median,
            gigabytes_per_second=size / median / 1e9,
            wrong=courier.wrong(),
        )


def exposed_on_stream(courier: Courier, compute: Compute, device: torch.device) -> float:
    """By how many seconds the current stream is later than with the compute alone, which is measured right before."""
    watch = Stopwatch(device)
    settle(device)
    watch.start()
    compute()
    alone = watch.stop()
    courier.pack()
    settle(device)
    watch.start()
    wait = courier.start()
    compute()
    wait()
    both = watch.stop()
    courier.check()
    return both - alone


def exposed_on_host(courier: Courier, compute: Compute, device: torch.device) -> float:
    """Seconds blocked in the wait."""
    courier.pack()
    settle(device)
    wait = courier.start()
    compute()
    blocked = time.perf_counter()
    wait()
    seconds = time.perf_counter() - blocked
    courier.check()
    return seconds


def ranks_of(given: argparse.Namespace) -> int:
    """One more than the stage has; on two GPUs a stage of two makes do with two."""
    if given.device != "cpu" and given.stage == 2 and torch.cuda.device_count() == 2:
        given.two_ranks = True
    return 2 if given.two_ranks else 1 + given.stage


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--sizes", type=nbytes, nargs="+", help="per message: 64KiB, 256MiB")
    options.add_argument("--count", type=int, default=20, help="messages for each row")
    options.add_argument("--stage", type=int, default=2, help="ranks of the receiving stage")
    options.add_argument("--two-ranks", action="store_true", help="rank 0 is also a member of the stage")
    options.add_argument(
        "--chunk-bytes", type=nbytes, nargs="+", help="pieces of lanes to compare: 1MiB, 4MiB"
    )
    given = parse(options, ranks_of)
    if given.two_ranks and given.stage != 2:
        options.error(f"--two-ranks: expected a stage of 2, got --stage {given.stage}")
    members = "0 and 1" if given.two_ranks else f"1 to {given.stage}"
    sys.exit(run(measure, given, f"rank 0 sends, rank 1 receives, broadcast in the stage of ranks {members}"))
