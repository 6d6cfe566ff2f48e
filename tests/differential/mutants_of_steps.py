"""Lists the checks to remove from gradients and dry runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from differential.mutation import Mutant
from differential.spec import Job
from ldt.runtime.dry_run import fake_module
from ldt.runtime.execution import absent_grads

__all__ = ["DRY_RUN", "GRADIENTS"]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a check."""


def _no_context(*args: Any, **kwargs: Any) -> Any:
    return nullcontext()


def _changes_gradients(job: Job) -> bool:
    return job.dp > 1 or job.reduction == "token"


def _zeros_for_absent(specs: Any, arrived: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Treat every arriving tensor as a gradient."""
    marked = absent_grads.unpack_grads(specs, arrived)
    grads = iter(arrived)
    coming = [next(grads) if spec.requires_grad and spec.used is not False else None for spec in specs]
    return [grad if found is None else found for grad, found in zip(coming, marked, strict=True)]


def _with_plain_objects(copies: Any, value: Any) -> Any:
    return value if isinstance(value, SimpleNamespace) else _copy_of(copies, value)


_copy_of = fake_module.FakeCopies.copy_of
GRADIENTS: tuple[Mutant, ...] = (
    Mutant(
        "gradients are not divided by tokens",
        ("ldt.runtime.execution.loss:TokenScale.finish",),
        _nothing,
        lambda job: job.reduction == "token",
    ),
    Mutant(
        "replicas are not averaged",
        ("ldt.runtime.execution.grad_reduce:GradReduction._write",),
        _nothing,
        lambda job: job.dp > 1,
    ),
    Mutant(
        "earlier gradients are lost",
        ("ldt.runtime.execution.grad_reduce:EarlierGradients.add_back",),
        _nothing,
        lambda job: any(not call.updates for call in job.calls) and _changes_gradients(job),
    ),
    Mutant(
        "infinite gradients are not shared between stages",
        ("ldt.train.grad_scaler:GradScaler._unscale_grads_",),
        torch.amp.GradScaler._unscale_grads_,
        lambda job: any(call.overflows for call in job.calls) and not job.has("Complex"),
    ),
    Mutant(
        "hooks on gradients are not checked",
        (
            "ldt.runtime.pipeline_setup:check_hooks_and_layers",
            "ldt.runtime.execution.step_runner:check_hooks_and_layers",
        ),
        _nothing,
        lambda job: job.has("GradHook", "PostHook") and _changes_gradients(job),
    ),
    Mutant(
        "absent gradients are zeros",
        ("ldt.runtime.execution.executor:unpack_grads",),
        _zeros_for_absent,
        lambda job: job.has("LayerDrop", "OddDetach", "Detach", "Drop"),
    ),
    Mutant(
        "all sent tensors count as used",
        ("ldt.runtime.step.shape_walk:used",),
        lambda inputs, *args: inputs,
        lambda job: job.has("Drop", "Detach"),
    ),
    Mutant(
        "all sent tensors count as used, and absent gradients are not counted",
        ("ldt.runtime.step.shape_walk:used", "ldt.runtime.execution.absent_grads:AbsentGrads.check"),
        lambda inputs, *args: inputs,
        lambda job: job.has("Drop", "Detach"),
    ),
    Mutant(
        "functions that accumulate gradients themselves run twice",
        ("ldt.runtime.execution.side_effects:PartWatch.watch_node",),
        _nothing,
        lambda job: job.has("Accumulates") and job.plan == "split",
    ),
    Mutant(
        "functions that change buffers run twice",
        ("ldt.runtime.execution.side_effects:PartWatch.check",),
        lambda *args: nullcontext,
        lambda job: job.has("Tally") and job.plan == "split",
    ),
    Mutant(
        "the second result of a hook is used",
        ("ldt.runtime.execution.split_backward:_replace_with",),
        _nothing,
        lambda job: job.has("TensorHook") and job.plan == "split",
    ),
    Mutant(
        "reentrant checkpoints are split",
        ("ldt.runtime.execution.split_backward:_UNSPLITTABLE",),
        {},
        lambda job: job.has("Checkpointed") and job.plan == "split",
    ),
)

DRY_RUN: tuple[Mutant, ...] = (
    Mutant(
        "only outputs that require a gradient in the dry run may require one",
        ("ldt.runtime.dry_run.grad_flow:DryRun.may_require_grad",),
        lambda run, outputs: [output.requires_grad for output in outputs],
        lambda job: job.has("LayerDrop") and job.has("Detach"),
    ),
    Mutant(
        "a dry run takes all branches",
        ("ldt.runtime.dry_run.grad_flow:DryRun._is_whole",),
        lambda run, outputs: True,
        lambda job: job.has("LayerDrop", "OddDetach"),
    ),
    Mutant(
        "a dry run advances random generators",
        ("ldt.runtime.dry_run.isolation:_random_states",),
        _no_context,
        lambda job: job.has("LayerDrop"),
    ),
    Mutant(
        "a dry run does not restore globals",
        ("ldt.runtime.dry_run.isolation:_Snapshot.restore",),
        _nothing,
        lambda job: job.has("Cache"),
    ),
    Mutant(
        "a dry run fills autocast's cache",
        ("ldt.runtime.dry_run.isolation:_without_autocast_cache",),
        _no_context,
        lambda job: job.autocasts and job.has("Single"),
    ),
    Mutant(
        "a dry run shares plain objects",
        ("ldt.runtime.dry_run.fake_module:FakeCopies.copy_of",),
        _with_plain_objects,
        lambda job: job.has("Memory", "Cache", "RunningMean", "ForwardHook"),
    ),
    Mutant(
        "a dry run calls hooks",
        ("ldt.runtime.dry_run.forward_hooks:is_defined_in",),
        lambda *args: True,
        lambda job: job.has("ForwardHook"),
    ),
    Mutant(
        "changed state is not detected",
        ("ldt.runtime.dry_run.fake_module:FakeCopies.state_changed",),
        lambda copies: False,
        lambda job: job.has("LayerDrop", "OddDetach"),
    ),
)
