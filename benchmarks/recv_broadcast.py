"""How much of a receive and its broadcast inside the stage is exposed behind compute?

Rank 0 sends to a stage of ``--tp`` ranks, of which rank 1 leads. Each message is launched, then comes a gap of compute
twice as long as the slowest path takes (a sleep: compute on an accelerator leaves the host's cores free), then a wait.
Paths:

- ``receive``    the bare receive on the leader, without any broadcast: the floor
- ``hand-made``  irecv, and in its wait a blocking broadcast, as code without lanes does: the baseline
- ``fused``      one lane, whose broadcast runs behind the receive

Times are in microseconds per message: median and 99th percentile (below 100 messages: the longest) from launch to end
without a gap, and the median of the time blocked in the wait after the gap (``exposed``), each of the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from harness import parser, run, slowest

from ldt._C import Lane
from ldt.cli.units import nbytes

SENDER, LEADER = 0, 1
Wait = Callable[[], object]
Launch = Callable[[torch.Tensor], Wait]


@dataclass(frozen=True)
class MessageRow:
    """One path at one size."""

    COLUMNS: ClassVar[Mapping[str, str]] = {
        "bytes": ">12",
        "count": ">6",
        "path": "<22",
        "p50 µs": ">10.0f",
        "p99 µs": ">10.0f",
        "exposed µs": ">11.0f",
        "GB/s": ">7.2f",
        "wrong": ">6",
    }
    bytes: int
    count: int
    path: str
    p50: float
    p99: float
    exposed: float
    gigabytes_per_second: float
    wrong: int


def stage_ranks() -> list[int]:
    return list(range(LEADER, dist.get_world_size()))


def bare_receive() -> Launch:
    group = dist.new_group([SENDER, LEADER])

    def launch(buffer: torch.Tensor) -> Wait:
        if dist.get_rank() > LEADER:
            return lambda: None
        work = (
            dist.isend(buffer, LEADER, group)
            if dist.get_rank() == SENDER
            else dist.irecv(buffer, SENDER, group)
        )
        assert work is not None
        return work.wait

    return launch


def hand_made() -> Launch:
    receive, stage = bare_receive(), dist.new_group(stage_ranks())

    def launch(buffer: torch.Tensor) -> Wait:
        wait_for_receive = receive(buffer)

        def wait() -> None:
            wait_for_receive()
            if dist.get_rank() != SENDER:
                dist.broadcast(buffer, LEADER, stage)

        return wait

    return launch


def fused(chunk_bytes: int | None) -> Launch:
    p2p, stage = dist.new_group([SENDER, LEADER]), dist.new_group(stage_ranks())
    rank = dist.get_rank()
    lane = Lane("fused", p2p=None if rank > LEADER else p2p, stage=None if rank == SENDER else stage,
                chunk_bytes=chunk_bytes, announce=False)  # fmt: skip

    def launch(buffer: torch.Tensor) -> Wait:
        work = lane.send([buffer], LEADER) if rank == SENDER else lane.recv([buffer], SENDER)
        return work.wait

    return launch


def time_one(launch: Launch, buffer: torch.Tensor, gap: float) -> tuple[float, float, int]:
    """Seconds from launch to end, of that blocked in the wait, and wrong elements."""
    truth = torch.arange(buffer.numel(), dtype=torch.int32)
    buffer.copy_(truth) if dist.get_rank() == SENDER else buffer.zero_()
    dist.barrier()
    start = time.perf_counter()
    wait = launch(buffer)
    time.sleep(gap)
    blocked = time.perf_counter()
    wait()
    end = time.perf_counter()
    return end - start, end - blocked, int((buffer != truth).sum())


def fastest(launch: Launch, buffer: torch.Tensor) -> float:
    """Seconds without a gap, of five times."""
    return min(time_one(launch, buffer, 0.0)[0] for _ in range(5))


def measure(arguments: argparse.Namespace) -> list[MessageRow]:
    paths = {"receive": bare_receive(), "hand-made": hand_made()}
    paths |= {
        f"fused{f' {chunk >> 10} KiB' if chunk else ''}": fused(chunk)
        for chunk in arguments.chunk_bytes or [None]
    }
    rows = []
    for message_bytes in arguments.sizes:
        buffer = torch.empty(max(1, message_bytes // 4), dtype=torch.int32)
        gap = 2 * slowest([max(fastest(launch, buffer) for launch in paths.values())])[0]
        # Paths take turns, so that what else the machine does hits all of them alike.
        direct = {path: [time_one(launch, buffer, 0.0)] for path, launch in paths.items()}
        hidden = {path: [time_one(launch, buffer, gap)] for path, launch in paths.items()}
        for _ in range(arguments.count):
            for path, launch in paths.items():
                direct[path].append(time_one(launch, buffer, 0.0))
                hidden[path].append(time_one(launch, buffer, gap))
        for path in paths:
            # The bare receive leaves the members out: they have nothing there to be wrong.
            alone = path == "receive" and dist.get_rank() > LEADER
            wrong = 0 if alone else sum(sample[2] for sample in direct[path] + hidden[path])
            seconds = [sample[0] for sample in direct[path][1:]]
            exposed = [sample[1] for sample in hidden[path][1:]]
            rows.append(message_row(path, buffer.nbytes, seconds, exposed, wrong))
    return rows


def message_row(
    path: str, message_bytes: int, seconds: Sequence[float], exposed: Sequence[float], wrong: int
) -> MessageRow:
    """The row of this measurement over all ranks; every rank calls it with as many values."""
    times, blocked = slowest(seconds), slowest(exposed)
    total_wrong = torch.tensor(wrong)
    dist.all_reduce(total_wrong)
    median = statistics.median(times)
    return MessageRow(
        bytes=message_bytes,
        count=len(times),
        path=path,
        p50=median * 1e6,
        p99=sorted(times)[max(0, round(0.99 * len(times)) - 1)] * 1e6,
        exposed=statistics.median(blocked) * 1e6,
        gigabytes_per_second=message_bytes / median / 1e9,
        wrong=int(total_wrong),
    )


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0])
    sizes = [64 << 10, 1 << 20, 16 << 20, 64 << 20]
    options.add_argument(
        "--sizes", type=nbytes, nargs="+", default=sizes, help="per message: 4096, 64KiB, 16MiB"
    )
    options.add_argument("--count", type=int, default=30, help="messages per row")
    options.add_argument(
        "--chunk-bytes", type=int, nargs="+", help="piece sizes of the fused lane to compare"
    )
    options.add_argument("--tp", type=int, default=2, help="ranks of the receiving stage")
    given = options.parse_args()
    context = f"receive on rank 1, broadcast in a stage of {given.tp}; gap: twice the slowest path"
    sys.exit(run(1 + given.tp, measure, MessageRow, given, context))
