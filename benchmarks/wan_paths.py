"""What crosses the link in wan.py: steps of ldt and of torch.distributed.pipelining, and plain TCP, on fresh processes.

Every function runs on all ranks (edge: rank 0, one rank for each stage) and returns a ``Measured``.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from clock import meet, slowest, total
from torch import nn
from torch_pipelines import step_of_plan
from wan_link import ADDRESSES, Link

import ldt
from ldt.plan import Plan
from ldt.runtime.common.device import synchronize_current_stream
from ldt.testing.models import on_backward

__all__ = ["Job", "Measured", "ldt_steps", "raw_tcp", "torch_steps"]

WIDTH = 64
# By compression, of the largest element of a gradient: orders of sums differ between plans, and packing rounds.
TOLERANCES = {"none": 1e-5, "bf16": 1e-2, "8bit": 5e-2}
PIECE = 1 << 20
PORT = 29877
UNTIL_OUTAGE = 0.2  # seconds


@dataclass(frozen=True)
class Job:
    """A step: seconds of each chunk's forward (a backward takes twice that), and bytes of each message."""

    topology: ldt.Topology
    plan: Plan
    forward: Sequence[float]
    message_bytes: int
    steps: int
    warm_up: int
    connections: Any  # between the sites, an int or "auto"; 0: one for each process group
    compression: Any = "none"  # of ldt
    outage: float = 0.0  # seconds
    device: str = "cpu"  # of all ranks; those of "cuda" share the GPUs there are

    @property
    def num_microbatches(self) -> int:
        return self.plan.num_microbatches

    @property
    def crossing_bytes(self) -> tuple[int, int]:
        """What a step sends from the edge, and to it: activations one way are gradients the other."""
        chunks = self.topology.num_chunks
        stages = [self.topology.stage_of(chunk) for chunk in range(chunks)]
        crossings = sum((a == 0) != (b == 0) for a, b in itertools.pairwise(stages))
        return (crossings * self.num_microbatches * self.message_bytes,) * 2


@dataclass(frozen=True)
class Measured:
    """Seconds of each counted step, bytes of one of them in each direction, wrong elements of its last gradients."""

    seconds: list[float]
    up: float
    down: float
    wrong: int


class PacedChunk(nn.Module):
    """Scales its input, and sleeps as long as a chunk computes: ranks compute side by side on any number of cores."""

    def __init__(self, forward: float, sleep: Callable[[float], None]) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))
        self.seconds = forward
        self.sleep = sleep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor:  # shape inference
            return x * self.scale
        self.sleep(self.seconds)
        return on_backward(x * self.scale, lambda: self.sleep(2 * self.seconds))


def _sleep_on(device: torch.device) -> Callable[[float], None]:
    """What takes so many seconds there: of the host, or of the current stream."""
    if device.type == "cpu":
        return time.sleep
    cycles = 200_000_000
    for _ in range(2):  # the first is on a GPU whose clock rises
        begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
        begin.record()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
    rate = cycles / (begin.elapsed_time(end) * 1e-3)
    return lambda seconds: torch.cuda._sleep(int(seconds * rate))  # type: ignore[no-untyped-call]


def _squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _model(
    job: Job, device: torch.device
) -> tuple[list[PacedChunk], list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    sleep = _sleep_on(device)
    chunks = [PacedChunk(seconds, sleep).to(device) for seconds in job.forward]
    rows = job.message_bytes // (4 * WIDTH)
    drawn = [(torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)) for _ in range(job.num_microbatches)]
    return chunks, [(inputs.to(device), target.to(device)) for inputs, target in drawn]


def ldt_steps(job: Job, link: Link) -> Measured:
    device = torch.device(job.device)
    settings: dict[str, Any] = {"connections": job.connections or None, "compression": job.compression}
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        settings |= {"device": device, "backend": "nccl", "transport": "host"}
    chunks, batch = _model(job, device)
    with ldt.connect(job.topology, **settings) as mesh:
        mine = [chunks[index] for index in job.topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, job.plan, _squares)
        return _measure(job, link, chunks, batch, lambda: pipeline.step(batch if mesh.is_edge else None))


def torch_steps(job: Job, link: Link) -> Measured:
    """The same compute order in torch's own runtime."""
    chunks, batch = _model(job, torch.device("cpu"))
    mine = {index: chunks[index] for index in job.topology.chunks_of(dist.get_rank())}
    return _measure(job, link, chunks, batch, step_of_plan(job.plan, mine, batch, _squares))


def _measure(
    job: Job,
    link: Link,
    chunks: Sequence[PacedChunk],
    batch: Sequence[tuple[torch.Tensor, torch.Tensor]],
    step: Callable[[], object],
) -> Measured:
    mine = [chunks[index] for index in job.topology.chunks_of(dist.get_rank())]

    def clean() -> None:
        for chunk in mine:
            chunk.zero_grad()

    seconds, up, down = _timed(job, link, step, clean)
    return Measured(seconds, up, down, _wrong(chunks, mine, batch, TOLERANCES[job.compression]))


def _timed(
    job: Job, link: Link, step: Callable[[], object], clean: Callable[[], None] = lambda: None
) -> tuple[list[float], float, float]:
    """Seconds of the slowest rank for each counted step, from a barrier on, and bytes up and down."""
    seconds, before = [], [0, 0]
    for turn in range(job.warm_up + job.steps):
        clean()
        meet()
        if turn == job.warm_up:
            before = [link.counters(direction).bytes for direction in range(2)]
        with _outage(link, job.outage if turn >= job.warm_up and dist.get_rank() == 0 else 0.0):
            start = time.perf_counter()
            step()
            synchronize_current_stream(torch.device(job.device))
            seconds.append(time.perf_counter() - start)
    meet()
    up, down = (
        (link.counters(direction).bytes - bytes_before) / job.steps
        for direction, bytes_before in enumerate(before)
    )
    return slowest(seconds[job.warm_up :]), up, down


@contextmanager
def _outage(link: Link, seconds: float) -> Iterator[None]:
    """Cuts both directions for that long, 0.2 s after the beginning of what runs inside, over or not."""

    def set_cut(cut: int) -> None:
        for direction in range(2):
            link.set(direction, cut=cut)

    changes = ((UNTIL_OUTAGE, 1), (UNTIL_OUTAGE + seconds, 0)) if seconds else ()
    timers = [threading.Timer(after, set_cut, (cut,)) for after, cut in changes]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.join()


def _wrong(
    chunks: Sequence[PacedChunk],
    mine: Sequence[PacedChunk],
    batch: Sequence[tuple[torch.Tensor, torch.Tensor]],
    tolerance: float,
) -> int:
    """Elements of all gradients that are not the unsplit model's."""
    scales = [chunk.scale.detach().clone().requires_grad_() for chunk in chunks]
    for inputs, target in batch:
        output = inputs
        for scale in scales:
            output = output * scale
        (_squares(output, target) / len(batch)).backward()  # type: ignore[no-untyped-call]
    wrong = 0
    for chunk, scale in zip(chunks, scales, strict=True):
        if any(chunk is other for other in mine):
            assert scale.grad is not None
            got = torch.full_like(scale, torch.nan) if chunk.scale.grad is None else chunk.scale.grad
            wrong += int((~((got - scale.grad).abs() <= tolerance * scale.grad.abs().max())).sum())
    return total(wrong)


def raw_tcp(job: Job, link: Link) -> Measured:
    """The bytes of a step both ways at once between the edge and rank 1, over ``job.connections`` plain connections."""
    rank = dist.get_rank()
    share = [amount // job.connections for amount in job.crossing_bytes]
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket_) for socket_ in _sockets(rank, job.connections)]
        out, back = share if rank == 0 else share[::-1]

        def step() -> None:
            work = [threading.Thread(target=_send, args=(socket_, out)) for socket_ in sockets]
            work += [threading.Thread(target=_receive, args=(socket_, back)) for socket_ in sockets]
            for thread in work:
                thread.start()
            for thread in work:
                thread.join()

        seconds, up, down = _timed(job, link, step)
    return Measured(seconds, up, down, 0)


def _sockets(rank: int, count: int) -> list[socket.socket]:
    """The ends of the connections on ranks 0 and 1; none on others."""
    if rank == 1:
        with socket.create_server((ADDRESSES[1], PORT), backlog=count) as server:
            meet()
            return [server.accept()[0] for _ in range(count)]
    meet()
    return [socket.create_connection((ADDRESSES[1], PORT)) for _ in range(count)] if rank == 0 else []


def _send(socket_: socket.socket, amount: int) -> None:
    piece = memoryview(os.urandom(PIECE))
    while amount:
        amount -= socket_.send(piece[:amount])


def _receive(socket_: socket.socket, amount: int) -> None:
    piece = bytearray(PIECE)
    while amount:
        got = socket_.recv_into(piece, min(PIECE, amount))
        if not got:
            raise ConnectionError(f"the connection ended {amount} bytes early")
        amount -= got
