"""Runs jobs on the ranks of a pool and reports how each ended."""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ldt
from differential.model import (
    Loss,
    Microbatches,
    build,
    make_optimizer,
    microbatches,
    next_random_numbers,
    seed_everything,
    values_of,
)
from differential.reference import CLIP_NORM, SCALER, Records, autocast_of, outputs_of
from differential.slow_lanes import slow_lanes
from differential.spec import Call, Job
from ldt.plan import Costs, Plan
from ldt.topology import Node, Topology

__all__ = ["Ending", "Raised", "run_jobs"]


@dataclass(frozen=True)
class Raised:
    """An exception of a rank; ``ours`` if ldt raised it, ``remote`` if another rank failed first."""

    call: int  # index of the call that raised; -1: Pipeline()
    kind: str
    text: str
    ours: bool
    remote: bool
    trace: str

    @classmethod
    def of(cls, error: BaseException, call: int) -> Raised:
        ours = isinstance(error, (ldt.LdtError, ldt.LaneError))
        trace = "".join(traceback.format_exception(error)[-12:])
        kind, remote = type(error).__name__, isinstance(error, ldt.RemoteStageError)
        return cls(call, kind, str(error), ours, remote, trace)


@dataclass
class Ending:
    """How a job ended on a rank: the ``records`` of each call, and what it ``raised``."""

    node: Node
    records: Records = field(default_factory=list)
    raised: Raised | None = None


def run_jobs(jobs: Sequence[Job], folder: Path, mutant: str = "") -> list[Ending]:
    """Run ``jobs``, which have the same mesh config, one after the other, with the ``mutant`` of that name applied."""
    warnings.simplefilter("ignore")
    endings, mesh = [], None
    with applied(mutant) if mutant else nullcontext():
        for job in jobs:
            mesh = mesh or connect(job)
            ending = run_job(mesh, job, folder)
            endings.append(ending)
            if _anywhere(ending.raised is not None):
                mesh.close()
                mesh = None
        if mesh is not None:
            mesh.close()
    return endings


def applied(mutant: str) -> AbstractContextManager[None]:
    """Apply a mutant by name. Imports them only when needed."""
    from differential.mutants import MUTANTS

    return next(known for known in MUTANTS if known.name == mutant).applied()


def connect(job: Job) -> ldt.Mesh:
    """Connect the mesh of a job, with short timeouts."""
    limit = timedelta(seconds=20)
    return ldt.connect(
        job.topology,
        lanes=job.lanes,
        transfer=job.transfer,
        timeout=limit,
        transfer_timeout=limit,
        stall_timeout=limit,
    )


def run_job(mesh: ldt.Mesh, job: Job, folder: Path) -> Ending:
    """Run a job; an exception goes into the ending."""
    rank = _Rank(mesh, job, folder / f"job-{job.seed}")
    ending = Ending(mesh.node, rank.records)
    try:
        lanes = slow_lanes(mesh, job.seed + mesh.rank) if job.slow else nullcontext()
        with lanes:
            rank.run()
    except Exception as error:
        ending.raised = Raised.of(error, rank.at)
    return ending


class _Rank:
    def __init__(self, mesh: ldt.Mesh, job: Job, folder: Path) -> None:
        self.mesh = mesh
        self.job = job
        self.folder = folder
        self.at = -1
        self.records: Records = []
        self.scaler = ldt.GradScaler(mesh, **SCALER) if job.scales else None
        self.group = mesh.tp_mesh.get_group() if job.topology.tp[mesh.stage] > 1 else None

    def run(self) -> None:
        job, mesh = self.job, self.mesh
        self.batches: list[Microbatches | None] = [None] * len(job.calls)
        if mesh.is_edge:
            self.batches = [microbatches(job, index, mesh.replica) for index in range(len(job.calls))]
        seed_everything(job.seed_of(mesh.node))
        self._build(0)
        for self.at, call in enumerate(job.calls):
            self._set_modes(training=not call.quiet)
            record = getattr(self, f"_{call.kind}")(call)
            self._set_modes(training=True)
            self.records.append(record | values_of(self.modules, gradients=False, group=self.group))
        mesh.control.all_gather(None)  # barrier
        self.records.append({"the next random numbers": next_random_numbers()})

    def _build(self, variation: int) -> None:
        job, mesh = self.job, self.mesh
        chunks = build(job, variation + job.variation_of(mesh.stage, mesh.rank))
        for part in chain(*(chunk.modules() for chunk in chunks)):
            if hasattr(part, "set_rank"):
                part.set_rank(mesh.tp_rank, job.topology.tp[mesh.stage], self.group)
        local = {index: chunks[index] for index in job.topology.chunks_of(mesh.stage)}
        loss = Loss(job) if mesh.is_edge else None
        self.modules: dict[str, Any] = {f"chunk {index}": chunk for index, chunk in local.items()}
        if loss is not None:
            self.modules["loss"] = loss
        self.pipeline = ldt.Pipeline(
            list(map(self._wrapped, local.values())),
            mesh,
            loss_fn=loss,
            loss_reduction=job.reduction,
            sync_weights=job.begin == "synced",
            sync_buffers=job.shares_buffers,
            grad_scaler=self.scaler,
            plan_factory=None if job.plan == "ushape" else _Planner(job),
        )
        self.optimizer = make_optimizer(job, self.pipeline.parameters())
        nothing = nn.Parameter(torch.zeros(()))
        self.scaled = self.optimizer or torch.optim.SGD([nothing])  # each rank has equally many optimizers

    def _wrapped(self, chunk: nn.Module) -> nn.Module:
        """Wrap in DistributedDataParallel if there are several replicas and parameters."""
        trains = any(parameter.requires_grad for parameter in chunk.parameters())
        if not (self.job.wraps and trains and self.mesh.dp_group is not None):
            return chunk
        return nn.parallel.DistributedDataParallel(chunk, process_group=self.mesh.dp_group)

    def _set_modes(self, training: bool) -> None:
        for module in self.modules.values():
            module.train(training)

    # -- one method for each kind of call ------------------------------------------------------------------------

    def _step(self, call: Call) -> dict[str, Any]:
        job = self.job
        ahead = self.batches[self.at + 1] if call.ahead else None
        with autocast_of(job):
            result = self.pipeline.step(self.batches[self.at], upcoming=ahead)
        record = self._losses(result)
        if self.scaler is not None and call.updates:
            self.scaler.unscale_(self.scaled)
        if job.clips and (call.updates or not job.scales):
            record["norm"] = ldt.clip_grad_norm_(self.pipeline.parameters(), CLIP_NORM, self.mesh).double()
        record |= values_of(self.modules, gradients=True, group=self.group)
        if call.updates:
            self._update()
        return record | {"scale": torch.tensor(1.0 if self.scaler is None else self.scaler.get_scale())}

    def _update(self) -> None:
        if self.scaler is not None:
            self.scaler.step(self.scaled)
            self.scaler.update()
        elif self.optimizer is not None:
            self.optimizer.step()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def _eval(self, call: Call) -> dict[str, Any]:
        with autocast_of(self.job):
            result = self.pipeline.eval(self.batches[self.at])
        record = self._losses(result)
        for number, output in enumerate(result.outputs if self.mesh.is_edge else ()):
            record |= outputs_of(number, output)
        return record

    def _losses(self, result: ldt.StepResult) -> dict[str, Any]:
        if not self.mesh.is_edge:
            return {}
        losses = [loss.reshape(1) for loss in result.losses]
        return {"loss": result.loss, "losses": losses[0].new_tensor([float(loss) for loss in losses])}

    def _validate(self, call: Call) -> dict[str, Any]:
        with autocast_of(self.job):
            self.pipeline.validate(self.batches[self.at])
        return {}

    def _thaw(self, call: Call) -> dict[str, Any]:
        for module in self.modules.values():
            module.requires_grad_(True)
        self.pipeline.forget_shapes()
        return {}

    def _save(self, call: Call) -> dict[str, Any]:
        ldt.save_checkpoint(self.folder, self.pipeline, self.optimizer, step=self.at)
        return {}

    def _load(self, call: Call) -> dict[str, Any]:
        ldt.load_checkpoint(self.folder, self.pipeline, self.optimizer)
        return {}

    def _restart(self, call: Call) -> dict[str, Any]:
        self._build(1)
        return self._load(call)


class _Planner:
    """Plans with random costs, equal on all ranks."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, topology: Topology, num_microbatches: int, training: bool) -> Plan:
        if not training:
            return ldt.plan.ushape(topology, num_microbatches, training=False, lanes=self._job.lanes)
        numbers = random.Random(self._job.seed)
        forward, backward = ([numbers.uniform(0.5, 3.0) for _ in self._job.chunks] for _ in range(2))
        costs = Costs(forward=forward, backward=backward, latency=numbers.choice([0.0, 0.5, 3.0]))
        split = self._job.plan == "split"
        return ldt.plan.optimize(
            topology, num_microbatches, costs=costs, split_backward=split, lanes=self._job.lanes
        )


def _anywhere(raised: bool) -> bool:
    """Whether a job raised on some rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return raised
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, raised)
    return any(answers)
