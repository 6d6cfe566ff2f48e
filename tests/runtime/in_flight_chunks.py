"""Chunks that keep a tensor that they send, and modify it later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["KINDS", "Keeping"]


class Keeping(nn.Module):
    """Returns the result of ``keep`` for the module, its input and its output; the last chunk, the first of it."""

    def __init__(self, keep: Callable[[Keeping, Tensor, Tensor], Any], last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(32))
        self.kept: Tensor | None = None
        self.keep = keep
        self.last = last

    def forward(self, x: Tensor, added: Tensor | float = 0.0) -> Any:
        outputs = self.keep(self, x, self.linear(x + added))
        return outputs[0] if self.last and isinstance(outputs, tuple) else outputs


def kept_output(module: Keeping, x: Tensor, y: Tensor) -> Tensor:
    return _kept(module, y, y)


def kept_alias(module: Keeping, x: Tensor, y: Tensor) -> Tensor:
    return _kept(module, y.detach(), y)


def kept_view(module: Keeping, x: Tensor, y: Tensor) -> Tensor:
    return _kept(module, y.view(-1)[8:], y)


def two_views_of_kept(module: Keeping, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    first = _kept(module, y.detach(), y)
    return first, y.view(-1).view(4, 8)


def view_of_kept(module: Keeping, x: Tensor, y: Tensor) -> Tensor:
    return _kept(module, y, y.view(4, 8))


def buffer_with_graph(module: Keeping, x: Tensor, y: Tensor) -> Tensor:
    module.kept = torch.zeros(4, 8) if module.kept is None else module.kept.detach()
    module.kept.copy_(y)
    return module.kept


def view_of_parameter(module: Keeping, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        module.bias.add_(1)
    return y, module.bias.view(4, 8)


def view_of_views(module: Keeping, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        module.bias.add_(1)
    return y, module.bias.view(4, 8).t().t()


def first_added(module: Keeping, x: Tensor, y: Tensor) -> Tensor:
    return module.linear(x + module.bias.view(4, 8))


def gradient_in_a_hook(module: Keeping, x: Tensor, y: Tensor) -> Tensor:
    def keep(grad: Tensor) -> None:
        module.kept = grad if module.kept is None else module.kept.add_(grad)

    if x.requires_grad:
        x.register_hook(keep)
    return y


def gradient_in_a_buffer(module: Keeping, x: Tensor, y: Tensor) -> Tensor:
    return module.linear(_InBuffer.apply(x, module))


class _InBuffer(torch.autograd.Function):
    """Its backward returns the same memory each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Keeping) -> Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        module = ctx.module
        module.kept = torch.empty_like(grad) if module.kept is None else module.kept
        return module.kept.copy_(grad), None


def _kept(module: Keeping, kept: Tensor, output: Tensor) -> Tensor:
    """The next forward clears the tensor that this one keeps."""
    if module.kept is not None:
        with torch.no_grad():
            module.kept.zero_()
    module.kept = kept
    return output


KINDS = {
    function.__name__.replace("_", " "): function
    for function in (
        kept_output,
        kept_alias,
        kept_view,
        two_views_of_kept,
        view_of_kept,
        buffer_with_graph,
        view_of_parameter,
        view_of_views,
        first_added,
        gradient_in_a_hook,
        gradient_in_a_buffer,
    )
}
