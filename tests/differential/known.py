"""Lists what the grammar does not draw, and which refusals are correct, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from differential.spec import Job

__all__ = ["MUST_REFUSE", "OFF", "REFUSALS", "Off", "Refusal"]


@dataclass(frozen=True)
class Off:
    """Jobs that are not drawn, for a known ``reason``."""

    reason: str
    holds: Callable[[Job], bool]


@dataclass(frozen=True)
class Refusal:
    """An error whose text matches ``pattern`` is correct for jobs for which it ``holds``."""

    name: str
    pattern: str
    holds: Callable[[Job], bool]

    def fits(self, job: Job, text: str) -> bool:
        return self.holds(job) and re.search(self.pattern, text) is not None


def _splits(job: Job) -> bool:
    return job.plan == "split"


def _numbers(job: Job, kind: str) -> list[int]:
    return [item.number for chunk in job.chunks for item in chunk if item.kind == kind]


def _has_reentrant(job: Job) -> bool:
    return any(number % 2 for number in _numbers(job, "Checkpointed"))


def _frozen_notes(job: Job) -> bool:
    """Whether something counts backwards that the unsplit model may not run: frozen, or behind what is all frozen."""
    counts = any(item.kind in ("Custom", "Tally") for chunk in job.frozen for item in job.chunks[chunk])
    hooked = [i for i, chunk in enumerate(job.chunks) if any(item.kind == "TensorHook" for item in chunk)]
    return counts or any(index > 0 and set(range(index)) <= set(job.frozen) for index in hooked)


def trains_apart(job: Job) -> bool:
    """Whether a trained layer is shared by chunks of two stages, or two trained layers have one name."""
    stages = job.topology.num_stages
    seen = not job.torn or job.names
    return any(
        seen
        and (bool(job.torn) or first % stages != second % stages)
        and not any(map(job.freezes, (first, second)))
        for first, second in job.ties
    )


def _differs_over_a_stage(job: Job) -> bool:
    return job.has("Uneven")


def _begins_unequal(job: Job) -> bool:
    """Whether ranks that should hold equal weights hold different ones."""
    return job.begin == "unequal" and any(
        {item.kind for item in chunk} - _WITHOUT_WEIGHTS and len(job.topology.ranks_of_stage(stage)) > 1
        for index, chunk in enumerate(job.chunks)
        if (stage := job.topology.stage_of(index)) > 0
    )


def _reduces(job: Job) -> bool:
    return job.reduction == "token" or job.dp > 1


def _sums_otherwise(job: Job) -> bool:
    """Whether float32 gradients are summed in another order, which would change all later values."""
    return job.has("Single") and bool(job.ties or job.clips or job.has("Parallel") or _reduces(job))


def _hooks_too_soon(job: Job) -> bool:
    """Whether a hook on a parameter's gradient would see an incomplete gradient."""
    topology = job.topology
    return any(
        item.kind in ("GradHook", "PostHook")
        for index, chunk in enumerate(job.chunks)
        if not job.freezes(index)
        and (job.reduction == "token" or topology.replicas(topology.stage_of(index)) > 1)
        for item in chunk
    )


_WITHOUT_WEIGHTS = {
    *("Views", "Emit", "Absorb", "Drop", "Alias", "Detach", "OddDetach", "StaticOutput"),
    *("TensorHook", "Cache", "Memory", "Dropout", "Uneven", "KeptOutput", "RunningMean"),
}


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "split backward of a reentrant checkpoint",
        "backward cannot be split: torch.utils.checkpoint with use_reentrant=True",
        lambda job: _splits(job) and _has_reentrant(job),
    ),
    Refusal(
        "a reentrant checkpoint after a detached graph",
        "requires no gradient, but was agreed as .* with use_reentrant=True",
        lambda job: _has_reentrant(job) and (job.has("Detach", "OddDetach", "LayerDrop") or bool(job.frozen)),
    ),
    Refusal(
        "split backward of a function that changes a buffer",
        "backward cannot be split: it changes .* itself",
        lambda job: _splits(job) and job.has("Tally"),
    ),
    Refusal(
        "in-place work on what a graph saved",  # legal in the unsplit model if the op that saved it gets no gradient
        "changes input . in place, and on the rank of chunk . something else refers to the memory",
        lambda job: job.has("InPlace"),
    ),
    Refusal(
        "replicas whose random numbers decide the memory layout",
        "disagree on what chunk . returns: .* in another memory layout",
        lambda job: job.dp > 1 and job.has("LayerDrop") and job.has("Views"),
    ),
    Refusal(
        "a loss that uses no output with a graph, but a trained tensor that is no parameter",
        "gave no gradient to its input .* in any microbatch",
        lambda job: job.loss == "Hidden" and job.has("Detach"),
    ),
    Refusal(
        "two layers of one name are saved",
        "two tensors of this rank would be saved as tied.weight",
        lambda job: bool(job.torn) and job.names,
    ),
    Refusal(
        "a loss that is detached from the model",
        "does not require a gradient although the output of the model does",
        lambda job: job.has("Detach", "OddDetach", "LayerDrop") or bool(job.frozen),
    ),
)

# Jobs that must be refused: any other outcome is a finding.
MUST_REFUSE: tuple[Refusal, ...] = (
    Refusal(
        "a layer that is on two stages, or split into two",
        "two stages hold it, and their copies would diverge|copy split it into two tensors",
        trains_apart,
    ),
    Refusal(
        "a loss with a trained tensor that is no parameter",
        "loss_fn uses a tensor of shape .* that requires a gradient",
        lambda job: job.loss == "Hidden" and _reduces(job),
    ),
    Refusal(
        "outputs that differ over a stage", "would receive one rank's tensor for all", _differs_over_a_stage
    ),
    Refusal("hooks on gradients that change later", "has a hook on its gradient", _hooks_too_soon),
    Refusal(
        "ranks of a stage begin with different weights",
        "train one model and must begin equal",
        _begins_unequal,
    ),
)

OFF: tuple[Off, ...] = (
    Off(
        "an output whose shape depends on contiguity: slices and expanded tensors arrive contiguous",
        lambda job: job.has("Views") and any(number % 5 == 1 for number in _numbers(job, "Alias")),
    ),
    Off(
        "a layer on two stages with different initial weights",
        lambda job: trains_apart(job) and job.begin != "equal",
    ),
    Off(
        "an unnamed layer on two stages that is unfrozen after the rest of the model was freed",
        lambda job: (
            bool(job.ties and job.frozen and not job.names) and any(call.kind == "thaw" for call in job.calls)
        ),
    ),
    Off(
        "sharded or wrapped modules with different initial weights",
        lambda job: job.begin != "equal" and (job.wraps or job.has("Parallel")),
    ),
    Off(
        "frozen functions that count their backwards, after a graph that a counter or a hook may detach",
        lambda job: job.has("OddDetach", "LayerDrop", "ForwardHook", "ModuleHook") and _frozen_notes(job),
    ),
    Off("float32 in another order", _sums_otherwise),
    Off(
        "ranks of a stage that may differ, as each sends its own tensor",
        lambda job: job.has("Uneven") and job.transfer in ("direct", "auto"),
    ),
)
