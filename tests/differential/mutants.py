"""Lists the checks to remove from ldt, with the jobs that must reveal each: data for ``differential.mutation``."""

from __future__ import annotations

from typing import Any

from differential.mutants_of_steps import DRY_RUN, GRADIENTS
from differential.mutation import Mutant
from differential.spec import Job
from ldt.runtime.execution import chunk_runner

__all__ = ["MUTANTS"]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a check."""


def _leaves_shared_memory(job: Job) -> bool:
    return job.has("StaticOutput", "Position", "KeptOutput", "MovedWeight")


def _changes_gradients(job: Job) -> bool:
    return job.dp > 1 or job.reduction == "token"


def _has_gradients_in_one(job: Job) -> bool:
    """Whether two parameters may share one gradient tensor, to which PyTorch adds nothing."""
    twice = any(sum(item.kind == "Position" for item in chunk) > 1 for chunk in job.chunks)
    return twice and any(call.kind == "step" and call.batches == (1,) for call in job.calls[:1])


_IN_FLIGHT: tuple[Mutant, ...] = (
    Mutant(
        "sent tensors keep their memory",
        ("ldt.runtime.execution.executor:own_memory",),
        lambda tensors, always=(): [],
        _leaves_shared_memory,
    ),
    Mutant(
        "sent tensors keep their memory, and versions are not compared",
        ("ldt.runtime.execution.executor:own_memory", "ldt.runtime.execution.in_flight:InFlightTensors.end"),
        lambda *args: [],
        _leaves_shared_memory,
    ),
    Mutant(
        "outputs of an eval keep their memory",
        ("ldt.runtime.execution.edge_chunks:own_memory",),
        lambda tensors: [],
        lambda job: job.has("MovedWeight") and any(call.kind == "eval" for call in job.calls),
    ),
    Mutant(
        "gradients may share memory",
        ("ldt.runtime.execution.grad_memory:GradMemory.separate",),
        lambda *args: [],
        lambda job: _has_gradients_in_one(job) and (job.clips or job.scales or _changes_gradients(job)),
    ),
    Mutant(
        "overlapping elements are not published",
        ("ldt.runtime.execution.executor:self_overlapping",),
        lambda tensors: [],
        lambda job: job.has("InPlace") and job.has("Views"),
    ),
    Mutant(
        "in-place changes of an input are not published",
        ("ldt.runtime.execution.aliasing:Aliasing.changes",),
        _nothing,
        lambda job: job.has("InPlace"),
    ),
    Mutant(
        "outputs that share memory are not published",
        ("ldt.runtime.execution.aliasing:Aliasing.shares",),
        _nothing,
        lambda job: job.has("InPlace"),
    ),
    Mutant(
        "inputs that are passed on are not published",
        ("ldt.runtime.execution.aliasing:Aliasing.passes",),
        _nothing,
        lambda job: job.has("InPlace") and job.has("Alias") and len(job.chunks) > 2,
    ),
)

_WEIGHTS: tuple[Mutant, ...] = (
    Mutant(
        "weights of ranks are not compared",
        ("ldt.runtime.model.initial_weights:Weights.compare",),
        _nothing,
        lambda job: job.begin == "unequal",
    ),
    Mutant(
        "only shapes of weights are compared",
        ("ldt.runtime.model.initial_weights:digests",),
        lambda tensors: [""] * len(tensors),
        lambda job: job.begin == "unequal",
    ),
    Mutant(
        "weights of the first rank are not broadcast",
        ("ldt.runtime.model.initial_weights:Weights.broadcast_from_first",),
        _nothing,
        lambda job: job.begin == "synced",
    ),
    Mutant(
        "ties between stages are not checked",
        ("ldt.runtime.model.ties:Ties.compare",),
        _nothing,
        lambda job: bool(job.ties),
    ),
    Mutant(
        "ties are detected by name only",
        ("ldt.runtime.model.ties:content_digest",),
        _nothing,
        lambda job: bool(job.ties) and not job.names and not job.torn,
    ),
    Mutant(
        "ties are detected by values only",
        ("ldt.runtime.model.ties:_name_mark",),
        _nothing,
        lambda job: bool(job.ties) and job.names and job.torn == "other",
    ),
    Mutant(
        "buffers of replicas are not broadcast",
        ("ldt.runtime.model.buffer_sync:BufferSync.run",),
        _nothing,
        lambda job: job.dp > 1 and job.has("RunningMean", "KeptOutput") and job.shares_buffers,
    ),
    Mutant(
        "outputs of a stage's ranks are not compared",
        ("ldt.runtime.model.divergence:DivergenceCheck.check",),
        _nothing,
        lambda job: job.has("Uneven"),
    ),
    Mutant(
        "tensor-parallel shards are not sharded in the norm",
        ("ldt.train.grad_norm:is_tensor_parallel",),
        lambda tensor: False,
        lambda job: job.has("Parallel") and job.clips and max(job.tp) > 1,
    ),
    Mutant(
        "tensor-parallel shards are not sharded in a checkpoint",
        ("ldt.train.checkpoint.tensor_parallel:is_tensor_parallel",),
        lambda tensor: False,
        lambda job: (
            job.has("Parallel") and max(job.tp) > 1 and any(call.kind == "load" for call in job.calls)
        ),
    ),
    Mutant(
        "parameters of the loss are not found",
        ("ldt.runtime.pipeline_setup:loss_module",),
        _nothing,
        lambda job: job.loss == "Weighted",
    ),
    Mutant(
        "parameters of the loss are not trained",
        ("ldt.runtime.execution.edge_chunks:TailRunner.named_parameters",),
        chunk_runner.ChunkRunner.named_parameters,
        lambda job: job.loss == "Weighted",
    ),
    Mutant(
        "unknown trained tensors of the loss are not checked",
        ("ldt.runtime.execution.loss:check_trained_leaves",),
        _nothing,
        lambda job: job.loss == "Hidden" and _changes_gradients(job),
    ),
)

MUTANTS: tuple[Mutant, ...] = _IN_FLIGHT + _WEIGHTS + GRADIENTS + DRY_RUN
