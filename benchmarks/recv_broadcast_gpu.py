"""On GPUs over NCCL: what does the broadcast inside the stage add to a receive, and what of it do GEMMs hide?

Rank 0 sends to a stage of ranks 1 (leader) to ``--stage``. Paths:

- ``receive``    the bare receive on the leader, without any broadcast: the floor
- ``hand-made``  irecv, and in its wait a broadcast, as code without lanes does: the baseline
- ``fused``      one lane, whose broadcast runs behind the receive

``p50`` is from launch to the end on the device, without other work. For ``exposed``, GEMMs that take about twice the
bare receive are launched before the wait; it is how much longer the compute stream takes with the message than
without, and ``of p50`` is that over the bare receive's time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
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
class GpuRow:
    """One path at one size."""

    COLUMNS: ClassVar[Mapping[str, str]] = {
        "bytes": ">12",
        "stage": ">6",
        "path": "<12",
        "p50 µs": ">10.1f",
        "over receive": ">13.3f",
        "exposed µs": ">11.1f",
        "of p50": ">7.1%",
        "GB/s": ">7.1f",
        "wrong": ">6",
    }
    bytes: int
    stage: int
    path: str
    p50: float
    over_receive: float
    exposed: float
    exposed_share: float
    gigabytes_per_second: float
    wrong: int


def bare_receive(stage: list[int]) -> Launch:
    group = dist.new_group([SENDER, LEADER], backend="nccl")
    rank = dist.get_rank()

    def launch(buffer: torch.Tensor) -> Wait:
        if rank > LEADER:
            return lambda: None
        call = dist.isend if rank == SENDER else dist.irecv
        work = call(buffer, LEADER + SENDER - rank, group)
        assert work is not None
        return work.wait

    return launch


def hand_made(stage: list[int]) -> Launch:
    receive, group = bare_receive(stage), dist.new_group(stage, backend="nccl")

    def launch(buffer: torch.Tensor) -> Wait:
        wait_for_receive = receive(buffer)

        def wait() -> None:
            wait_for_receive()
            if dist.get_rank() != SENDER:
                dist.broadcast(buffer, LEADER, group)

        return wait

    return launch


def fused(stage: list[int]) -> Launch:
    p2p, group = dist.new_group([SENDER, LEADER], backend="nccl"), dist.new_group(stage, backend="nccl")
    rank = dist.get_rank()
    lane = Lane(
        "fused",
        p2p=p2p if rank <= LEADER else None,
        stage=group if rank >= LEADER else None,
        device=torch.device("cuda", rank),
    )

    def launch(buffer: torch.Tensor) -> Wait:
        work = lane.send([buffer], LEADER) if rank == SENDER else lane.recv([buffer], SENDER)
        return work.wait

    return launch


def meet() -> None:
    """A barrier on the host."""
    dist.all_reduce(torch.zeros(1))


def direct(launch: Launch, buffer: torch.Tensor) -> float:
    """Seconds from launch to end."""
    torch.cuda.synchronize()
    meet()
    start = time.perf_counter()
    launch(buffer)()
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - start


def behind_gemms(launch: Launch | None, buffer: torch.Tensor, matrix: torch.Tensor, count: int) -> float:
    """Seconds that the compute stream takes for ``count`` GEMMs and then the wait for a message."""
    torch.cuda.synchronize()
    meet()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    wait = launch(buffer) if launch is not None else None
    for _ in range(count):
        torch.mm(matrix, matrix)
    if wait is not None:
        wait()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure(arguments: argparse.Namespace) -> list[GpuRow]:
    stage = list(range(LEADER, arguments.stage + 1))
    paths = {"receive": bare_receive(stage), "hand-made": hand_made(stage), "fused": fused(stage)}
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    gemm = min(behind_gemms(None, matrix, matrix, 20) for _ in range(5)) / 20
    rows = []
    for size in arguments.sizes:
        buffer = torch.empty(size // 4, dtype=torch.int32, device="cuda")
        wrong = {path: count_wrong(path, launch, buffer) for path, launch in paths.items()}
        floor = slowest([min(direct(paths["receive"], buffer) for _ in range(5))])[0]
        count = max(2, round(2 * floor / gemm))
        times: dict[str, list[tuple[float, float, float]]] = {path: [] for path in paths}
        for _ in range(arguments.count):  # paths take turns
            for path, launch in paths.items():
                alone = behind_gemms(None, buffer, matrix, count)
                times[path].append(
                    (direct(launch, buffer), behind_gemms(launch, buffer, matrix, count), alone)
                )
        medians = {
            path: [statistics.median(slowest(list(column))) for column in zip(*samples, strict=True)]
            for path, samples in times.items()
        }
        receive = medians["receive"][0]
        for path, (took, hidden, alone) in medians.items():
            exposed = max(0.0, hidden - alone)
            rows.append(
                GpuRow(
                    size,
                    len(stage),
                    path,
                    took * 1e6,
                    took / receive,
                    exposed * 1e6,
                    exposed / took,
                    size / took / 1e9,
                    wrong[path],
                )
            )
    return rows


def count_wrong(path: str, launch: Launch, buffer: torch.Tensor) -> int:
    """Wrong elements of one message, over all ranks that must have it."""
    truth = torch.arange(buffer.numel(), dtype=torch.int32, device="cuda")
    buffer.copy_(truth) if dist.get_rank() == SENDER else buffer.zero_()
    torch.cuda.synchronize()
    meet()
    launch(buffer)()
    spared = path == "receive" and dist.get_rank() > LEADER  # nothing is sent there
    total = torch.tensor(0 if spared else int((buffer != truth).sum()))
    dist.all_reduce(total)
    return int(total)


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0])
    sizes = [1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
    options.add_argument("--sizes", type=nbytes, nargs="+", default=sizes, help="per message: 1MiB, 256MiB")
    options.add_argument("--count", type=int, default=20, help="messages per row")
    options.add_argument(
        "--stage", type=int, default=2, help="ranks of the receiving stage; one GPU more is needed"
    )
    given = options.parse_args()
    sys.exit(
        run(
            given.stage + 1,
            measure,
            GpuRow,
            given,
            f"receive on rank 1, broadcast to ranks 2 to {given.stage}",
            backend="nccl",
        )
    )
