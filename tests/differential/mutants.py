"""What is taken out of ldt, and for which jobs that must be found: data for ``differential.mutation``."""

from __future__ import annotations

from typing import Any

from differential.mutants_of_steps import DRY_RUN, GRADIENTS
from differential.mutation import Mutant
from differential.spec import Job
from ldt.runtime.execution import chunk_runner

__all__ = ["MUTANTS"]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Instead of a check."""


def _leaves_shared_memory(job: Job) -> bool:
    return job.has("StaticOutput", "Position", "KeptOutput", "MovedWeight")


def _changes_gradients(job: Job) -> bool:
    return job.dp > 1 or job.reduction == "token"


def _has_gradients_in_one(job: Job) -> bool:
    """Whether the gradient of one row may become that of two parameters, and PyTorch adds nothing to it."""
    twice = any(sum(item.kind == "Position" for item in chunk_runner) > 1 for chunk in job.chunks)
    return twice and any(call.kind == "step" and call.batches == (1,) for call in job.calls[:1])


_UNDER_WAY: tuple[Mutant, ...] = (
    Mutant(
        "what leaves keeps its memory",
        ("ldt.runtime.execution.executor:own_memory",),
        lambda tensors, always=(): [],
        _leaves_shared_memory,
    ),
    Mutant(
        "what leaves keeps its memory, and versions are not compared",
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
        "gradients that are one in memory stay so",
        ("ldt.runtime.execution.grad_memory:GradMemory.separate",),
        lambda *args: [],
        lambda job: _has_gradients_in_one(job) and (job.clips or job.scales or _changes_gradients(job)),
    ),
    Mutant(
        "elements that are one in memory are not told",
        ("ldt.runtime.execution.executor:self_overlapping",),
        lambda tensors: [],
        lambda job: job.has("InPlace") and job.has("Views"),
    ),
    Mutant(
        "work in place on an input is not told",
        ("ldt.runtime.execution.aliasing:Aliasing.changes",),
        _nothing,
        lambda job: job.has("InPlace"),
    ),
    Mutant(
        "outputs that share memory are not told",
        ("ldt.runtime.execution.aliasing:Aliasing.shares",),
        _nothing,
        lambda job: job.has("InPlace"),
    ),
    Mutant(
        "inputs that are passed on are not told",
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
        "of weights of ranks only shapes are compared",
        ("ldt.runtime.model.initial_weights:digests",),
        lambda tensors: [""] * len(tensors),
        lambda job: job.begin == "unequal",
    ),
    Mutant(
        "weights of the first rank are not sent",
        ("ldt.runtime.model.initial_weights:Weights.send",),
        _nothing,
        lambda job: job.begin == "synced",
    ),
    Mutant(
        "what stages share is not looked for",
        ("ldt.runtime.model.ties:Ties.compare",),
        _nothing,
        lambda job: bool(job.ties),
    ),
    Mutant(
        "what stages share is known by its name alone",
        ("ldt.runtime.model.ties:content_digest",),
        _nothing,
        lambda job: bool(job.ties) and not job.names and not job.torn,
    ),
    Mutant(
        "what stages share is known by its values alone",
        ("ldt.runtime.model.ties:_name_mark",),
        _nothing,
        lambda job: bool(job.ties) and job.names and job.torn == "other",
    ),
    Mutant(
        "buffers of replicas are not sent",
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
        "parts of a stage's ranks are no parts in the norm",
        ("ldt.train.grad_norm:is_tensor_parallel",),
        lambda tensor: False,
        lambda job: job.has("Parallel") and job.clips and max(job.tp) > 1,
    ),
    Mutant(
        "parts of a stage's ranks are no parts in a checkpoint",
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
        "what the loss trains besides is not looked for",
        ("ldt.runtime.execution.loss:check_trained_leaves",),
        _nothing,
        lambda job: job.loss == "Hidden" and _changes_gradients(job),
    ),
)

MUTANTS: tuple[Mutant, ...] = _UNDER_WAY + _WEIGHTS + GRADIENTS + DRY_RUN
