"""What does the broadcast within the stage add to a receive, and how much of both does compute hide?

Rank 0 sends to a stage of ``--stage`` ranks led by rank 1. With ``--two-ranks``, the default on two GPUs, rank 0 is
also a member of the stage. Paths:

- ``receive alone``  the bare receive on the leader without any broadcast: the lower bound
- ``hand-made``      irecv with a broadcast in its wait, as code without lanes does it: the baseline
- ``fused, ...``     one lane over that transport, whose broadcast runs behind the receive; with ``--chunk-bytes``
                     (which implies ``--two-ranks``) also lanes with pieces of those sizes

Receives are posted first (except for the hand-made broadcast), then the ranks synchronize, then rank 0 sends. ``p50``
and ``p99`` run from the send to the end on the last rank without other work, on the host. For ``exposed``, compute that
takes about twice the bare receive is launched before the wait. On a GPU the compute is GEMMs; ``exposed`` is how much
longer the compute stream takes with the message than without, counted from the launch of the send, which the idle GPU
has to await as well; ``in wait`` is the time that stream spends in the wait itself. On the CPU the compute is a sleep
(compute on an accelerator leaves the host's cores free) of twice the slowest path, and both are the time blocked in the
wait, on the slowest rank. ``share`` is ``in wait`` over p50; ``bounced`` is the share of messages that did not go
directly into posted memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from clock import Passage, Stopwatch, durations, high, settle, slowest
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
    path: str = column("path", "<28")
    p50: float = column("p50 µs", ">10.1f")
    p99: float = column("p99 µs", ">10.1f")
    over_receive: float = column("over receive", ">12.2f")
    exposed: float = column("exposed µs", ">11.1f")
    in_wait: float = column("in wait µs", ">11.1f")
    share: float = column("share", ">7.1%")
    gigabytes_per_second: float = column("GB/s", ">7.2f")
    bounced: float | None = column("bounced", ">8.0%")
    wrong: int = column("#wrong", ">7")


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    device = device_of(arguments)
    with stage_paths(arguments) as paths:
        gemms = Gemms(LOADS["cuda"][0], device) if device.type == "cuda" else None
        gemm = slowest([gemms.time_of_one()])[0] if gemms else 0.0
        for size in arguments.sizes or SIZES[arguments.device]:
            couriers = [Courier(path, size, device) for path in paths]
            direct = [durations([courier.carry() for _ in range(5)]) for courier in couriers]
            compute: Compute
            if gemms is not None:
                gemms.kind = replace(gemms.kind, count=max(2, round(2 * min(direct[0]) / gemm)))
                compute = gemms
            else:
                compute = Sleep(2 * max(min(times) for times in direct))
            yield from rows_of(size, couriers, compute, arguments, device)


class Exposure(NamedTuple):
    """Seconds by which a message delays compute, and the part of them spent in the wait."""

    all: float
    in_wait: float


@dataclass
class Sleep:
    """On the host, a sleep stands in for compute on an accelerator."""

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
    """Measure paths in turn, so that other load on the machine affects all of them alike."""
    passages: list[list[Passage]] = [[] for _ in couriers]
    exposures: list[list[Exposure]] = [[] for _ in couriers]
    measure_exposure = exposed_on_stream if device.type == "cuda" else exposed_on_host
    for _ in range(arguments.count):
        for courier, found, showed in zip(couriers, passages, exposures, strict=True):
            found.append(courier.carry())
            showed.append(measure_exposure(courier, compute, device))
    receive = statistics.median(durations(passages[0]))
    for courier, found, showed in zip(couriers, passages, exposures, strict=True):
        took = durations(found)
        median = statistics.median(took)
        exposed, in_wait = (max(0.0, statistics.median(slowest(part))) for part in zip(*showed, strict=True))
        yield MessageRow(
            size=size,
            stage=arguments.stage,
            count=len(took),
            path=courier.path.name,
            p50=median * 1e6,
            p99=high(took) * 1e6,
            over_receive=median / receive,
            exposed=exposed * 1e6,
            in_wait=in_wait * 1e6,
            share=in_wait / median,
            gigabytes_per_second=size / median / 1e9,
            bounced=courier.bounced(),
            wrong=courier.wrong(),
        )


def exposed_on_stream(courier: Courier, compute: Compute, device: torch.device) -> Exposure:
    """Return how much later the current stream ends than with the compute alone, which is measured right before."""
    watch = Stopwatch(device)
    settle(device)
    watch.start()
    compute()
    watch.split()
    alone, nothing = watch.stop_split()
    courier.ready()
    watch.start()
    courier.start()
    compute()
    watch.split()
    courier.wait()
    both, waited = watch.stop_split()
    courier.check()
    return Exposure(both - alone, waited - nothing)


def exposed_on_host(courier: Courier, compute: Compute, _: torch.device) -> Exposure:
    """Return the seconds blocked in the wait."""
    courier.ready()
    courier.start()
    compute()
    blocked = time.perf_counter()
    courier.wait()
    seconds = time.perf_counter() - blocked
    courier.check()
    return Exposure(seconds, seconds)


def ranks_of(given: argparse.Namespace) -> int:
    """Return one rank more than the stage has; on two GPUs, two for a stage of two."""
    given.two_ranks |= bool(given.chunk_bytes)
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
