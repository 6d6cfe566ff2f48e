"""The small job that faults are injected into: it trains, saves every other step, and reports."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import ldt
from faults import checkpoints
from faults.fault import MICROBATCHES, SAVE_EVERY, STEPS, Fault
from faults.injection import HEARTBEAT_SECONDS, Trap
from faults.leak_check import Resources
from faults.worker_pool import Worker
from ldt.testing import ToyChunk, paced, toy_loss, toy_microbatches
from ldt.testing.models import on_backward
from ldt.topology import Topology

__all__ = ["CONNECT_SECONDS", "Order", "Raised", "Report", "train"]

_WIDTH = 16
CONNECT_SECONDS = 20
Microbatches = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Order:
    """What a rank runs: a job in its own ``world``, from the last checkpoint in ``folder`` if any.

    Its links may be down for ``outage`` seconds.
    """

    world: str
    topology: Topology
    folder: Path
    fault: Fault | None = None
    outage: float = 0.0


@dataclass(frozen=True)
class Raised:
    """An exception as the harness sees it; ``time`` is CLOCK_MONOTONIC, ``ours`` if ldt raised it.

    ``rank`` and ``cause`` are those of a RemoteStageError.
    """

    time: float
    kind: str
    text: str
    trace: str
    remote: bool
    ours: bool
    rank: int | None = None
    cause: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Raised:
        remote = isinstance(error, ldt.RemoteStageError)
        ours = isinstance(error, (ldt.LdtError, ldt.LaneError))
        trace = "".join(traceback.format_exception(error)[-12:])
        rank, cause = getattr(error, "rank", None), getattr(error, "error_type", None)
        return cls(time.monotonic(), type(error).__name__, str(error), trace, remote, ours, rank, cause)


@dataclass
class Report:
    """What a rank reports. Steps are counted from 1; ``digests`` are of its weights after each step."""

    loaded: int | None = None
    done: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    tried: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    refused: Raised | None = None  # by a failed save, after which the job continued
    failure: Raised | None = None
    closed: float = 0.0  # CLOCK_MONOTONIC
    leaked: list[str] = field(default_factory=list)


def train(worker: Worker, order: Order) -> Report:
    """Run the job; an exception goes into the report."""
    before = Resources.now()
    report = Report()
    world = order.topology.world_size
    limit = paced(30)
    dist.init_process_group(
        "gloo", store=worker.store(order.world), rank=worker.rank, world_size=world, timeout=limit
    )
    with suppress(Exception):
        _connect_and_train(order, Trap(order.fault, worker), report)
    report.closed = time.monotonic()
    dist.destroy_process_group()
    report.leaked = before.leaked_since()
    return report


def _connect_and_train(order: Order, trap: Trap, report: Report) -> None:
    trap.before_connect()
    trap.reach("connect")
    with _reporting(report), _connect(order) as mesh:
        trap.connected(mesh)
        with _reporting(report):  # inner context: closing does not count
            _train(mesh, order, trap, report)
        trap.reach("close")


def _train(mesh: ldt.Mesh, order: Order, trap: Trap, report: Report) -> None:
    chunks = [_Chunk(index, mesh, trap) for index in order.topology.chunks_of(mesh.stage)]

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        trap.reach("loss")
        return toy_loss(output, target)

    pipeline = ldt.Pipeline(chunks, mesh, loss_fn=loss_fn if mesh.is_edge else None)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *unused: trap.reach("optimizer"))
    report.loaded = checkpoints.load(order.folder, pipeline, optimizer)
    report.done = report.loaded or 0
    report.digests[report.done] = _digest(pipeline)
    for step in range(report.done, STEPS):
        trap.begin(step)
        pipeline.step(_microbatches(step, mesh, trap))
        ldt.clip_grad_norm_(pipeline.parameters(), 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()
        report.done = step + 1
        report.digests[report.done] = _digest(pipeline)
        if report.done % SAVE_EVERY == 0:
            _save(pipeline, optimizer, order, trap, report)


def _save(
    pipeline: ldt.Pipeline, optimizer: torch.optim.Optimizer, order: Order, trap: Trap, report: Report
) -> None:
    report.tried.append(report.done)
    try:
        trap.reach("save")
        checkpoints.save(order.folder, pipeline, optimizer, report.done)
        report.saved.append(report.done)
    except Exception as error:
        if order.fault is None or order.fault.kind != "disk_full":
            raise
        report.refused = Raised.of(error)
    finally:
        trap.release()


def _microbatches(step: int, mesh: ldt.Mesh, trap: Trap) -> Microbatches | None:
    """Draw microbatches of a new shape in each step, so that each step has a new message."""
    trap.reach("data")
    if not mesh.is_edge:
        return None
    return toy_microbatches(MICROBATCHES, _WIDTH, batch=2 + step, seed=100 * mesh.replica + step)


def _connect(order: Order) -> ldt.Mesh:
    return ldt.connect(
        order.topology,
        timeout=paced(CONNECT_SECONDS),
        heartbeat_timeout=timedelta(seconds=HEARTBEAT_SECONDS),
        outage=timedelta(seconds=order.outage),
    )


@contextmanager
def _reporting(report: Report) -> Iterator[None]:
    """Record an exception before anything is closed."""
    try:
        yield
    except Exception as error:
        report.failure = report.failure or Raised.of(error)
        raise


def _digest(pipeline: ldt.Pipeline) -> str:
    found = hashlib.sha256()
    for parameter in pipeline.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


class _Chunk(ToyChunk):
    """Reports its forwards and backwards to a trap, with an all-reduce in the node in between."""

    def __init__(self, index: int, mesh: ldt.Mesh, trap: Trap) -> None:
        torch.manual_seed(index)
        super().__init__(_WIDTH)
        self.trap = trap
        self.group = mesh.tp_mesh.get_group() if mesh.tp_mesh.size() > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor:  # while shapes are inferred
            return super().forward(x)
        self.reach("forward")
        return on_backward(super().forward(x), partial(self.reach, "backward"))

    def reach(self, place: str) -> None:
        """Reach a point, and all-reduce in the node, as tensor-parallel layers do in each direction."""
        self.trap.reach(place)
        if self.group is not None:
            dist.all_reduce(torch.ones(_WIDTH), group=self.group)
