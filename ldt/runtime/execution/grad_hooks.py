"""What cannot be where gradients change after the backward: hooks on those of parameters, and sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from ldt.runtime.common.redact import InputValueError
from ldt.runtime.execution.grad_reduce import is_reduced_elsewhere, refuse_sparse_layers
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.module_state import parts_of

__all__ = ["check_gradients"]

_OF_WRAPPERS = ("torch.distributed", "torch.nn.parallel")  # whose own hooks are no business of the user's


def check_gradients(
    modules: Mapping[int, nn.Module], of_loss: nn.Module | None, mesh: Mesh, per_token: bool
) -> None:
    """Raise ValueError for a hook on a parameter of chunks or of the loss that would not see the step's gradient.

    And for a layer with sparse gradients that would have to be averaged.
    Hooks see what a microbatch adds (or, after accumulation, the sum so far), as in the whole model. That is not so
    where gradients are divided at the end of the step, ``per_token``, or are then reduced over replicas.
    """
    replicated = mesh.topology.replicas(mesh.stage) > 1
    if not (per_token or replicated):
        return
    places = {f"chunk {index}": module for index, module in modules.items()}
    if of_loss is not None:
        places["loss_fn"] = of_loss
    refuse_sparse_layers(places, mesh)
    for where, module in places.items():
        for parameter in _hooked(module):
            reduced = replicated and not is_reduced_elsewhere(parameter, mesh)
            sees = parameter.requires_grad and (per_token or reduced)
            hook = next(_hooks_of(parameter), None) if sees else None
            if hook is not None:
                name = next(name for name, other in module.named_parameters() if other is parameter)
                raise InputValueError(_text(where, name, hook, per_token))


def _hooked(module: nn.Module) -> list[nn.Parameter]:
    """The parameters with any hook, found in each step."""
    held = [parameter for part in parts_of(module) for parameter in part._parameters.values()]
    return [
        parameter
        for parameter in held
        if parameter is not None
        and (
            parameter._backward_hooks
            or parameter._post_accumulate_grad_hooks
            or getattr(parameter, "_in_backward_optimizers", None)
        )
    ]


def _text(where: str, name: str, hook: str, per_token: bool) -> str:
    then = "reduced over replicas"
    if per_token:
        then = 'divided by the number of tokens (loss_reduction="token")'
    return (
        f"{where}: {name} has a hook on its gradient ({hook}), which would run before gradients are {then}, at the end "
        "of a step, and so see other values than in the whole model: remove it, and do what it does after step(), "
        "where gradients are complete"
    )


def _hooks_of(parameter: nn.Parameter) -> Iterator[str]:
    """By name."""
    if getattr(parameter, "_in_backward_optimizers", None):
        yield "an optimizer in the backward"
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        for hook in (hooks or {}).values():
            if not _module_of(hook).startswith(_OF_WRAPPERS):
                yield getattr(hook, "__qualname__", type(hook).__qualname__)


def _module_of(hook: Callable[..., Any]) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or type(hook).__module__
