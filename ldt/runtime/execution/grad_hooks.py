"""Refuses hooks on gradients that change after the backward, and sparse gradients that must be averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from ldt._torch_private import backward_optimizers, grad_hooks, with_grad_hooks
from ldt.runtime.common.redact import InputValueError
from ldt.runtime.execution.grad_reduce import check_sparse_layers, is_reduced_elsewhere
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.module_state import all_submodules

__all__ = ["check_hooks_and_layers"]

_WRAPPERS = ("torch.distributed", "torch.nn.parallel")  # their hooks are not the user's


def check_hooks_and_layers(
    modules: Mapping[int, nn.Module], loss_module: nn.Module | None, mesh: Mesh, per_token: bool
) -> None:
    """Check the hooks on parameters, and the layers, of the chunks and of the loss.

    A hook sees what a microbatch adds (or, after accumulation, the sum so far), as in the whole model. It would see
    other values where the step divides gradients at its end (``per_token``) or reduces them over replicas.

    Raises:
        ValueError: for such a hook, or for a layer whose sparse gradients would have to be averaged.
    """
    replicated = mesh.topology.replicas(mesh.stage) > 1
    if not (per_token or replicated):
        return
    owners = {f"chunk {index}": module for index, module in modules.items()}
    if loss_module is not None:
        owners["loss_fn"] = loss_module
    check_sparse_layers(owners, mesh)
    for owner, module in owners.items():
        for parameter in _hooked(module):
            reduced = replicated and not is_reduced_elsewhere(parameter, mesh)
            changes_later = parameter.requires_grad and (per_token or reduced)
            hook = next(_hook_names(parameter), None) if changes_later else None
            if hook is not None:
                name = next(name for name, other in module.named_parameters() if other is parameter)
                raise InputValueError(_text(owner, name, hook, per_token))


def _hooked(module: nn.Module) -> list[nn.Parameter]:
    """The parameters with any hook. Each step looks again."""
    parts = all_submodules(module)
    return with_grad_hooks([parameter for part in parts for parameter in part._parameters.values()])


def _text(owner: str, name: str, hook: str, per_token: bool) -> str:
    change = "reduced over replicas"
    if per_token:
        change = 'divided by the number of tokens (loss_reduction="token")'
    return (
        f"{owner}: {name} has a hook on its gradient ({hook}). It would run before gradients are {change} at the end "
        "of the step and see other values than in the whole model: remove it and do its work after step(), when "
        "gradients are complete"
    )


def _hook_names(parameter: nn.Parameter) -> Iterator[str]:
    if backward_optimizers(parameter):
        yield "an optimizer in the backward"
    for hook in grad_hooks(parameter):
        if not _module_of(hook).startswith(_WRAPPERS):
            yield getattr(hook, "__qualname__", type(hook).__qualname__)


def _module_of(hook: Callable[..., Any]) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or type(hook).__module__
