"""Parts with a user-defined backward: custom functions and hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from differential.layers import Extras, Part

__all__ = [
    "Accumulates",
    "Custom",
    "ForwardHook",
    "GradHook",
    "ModuleHook",
    "PostHook",
    "Tally",
    "TensorHook",
]


class _Product(torch.autograd.Function):
    """Calls ``note`` with the gradient in each backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, note: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.note = note
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.note(grad)
        return grad @ weight, grad.t() @ x, None


class Custom(Part):
    """A custom function that counts its backwards."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.matrix = self.weight(width, width)
        self.tally = SimpleNamespace(count=0)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return _Product.apply(x, self.matrix, self.count), extras

    def count(self, grad: torch.Tensor) -> None:
        self.tally.count += 1

    def record(self) -> list[float]:
        return [self.tally.count]


class _Accumulating(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        if weight.requires_grad:
            update = grad.t() @ x
            if weight.grad is None:
                weight.grad = update
            else:
                weight.grad += update
        return grad @ weight, None


class Accumulates(Part):
    """A custom function that accumulates into the weight's gradient itself, as fused kernels do."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.matrix = self.weight(width, width)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return _Accumulating.apply(x, self.matrix), extras


class Tally(Part):
    """A custom function that sums its incoming gradients in a buffer."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.matrix = self.weight(width, width)
        self.register_buffer("total", torch.zeros(width, dtype=torch.float64))

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return _Product.apply(x, self.matrix, self.add), extras

    def add(self, grad: torch.Tensor) -> None:
        self.total.add_(grad.sum(0))


class ForwardHook(Part):
    """A layer with a forward hook that reads or changes its output."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.layer = nn.Linear(width, width, dtype=torch.float64)
        self.log = SimpleNamespace(seen=[])
        log, way = self.log, number % 3

        def after(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
            log.seen.append(float(output.detach().sum()) if way == 0 else len(output))
            return 2 * output if way == 2 else None

        self.layer.register_forward_hook(after)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return self.layer(x), extras

    def record(self) -> list[float]:
        return list(self.log.seen)


class ModuleHook(Part):
    """A layer with a full backward hook that counts."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.layer = nn.Linear(width, width, dtype=torch.float64)
        self.log = SimpleNamespace(count=0)
        log = self.log

        def after(module: nn.Module, given: Any, found: Any) -> None:
            log.count += 1

        self.layer.register_full_backward_hook(after)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return torch.tanh(self.layer(x)), extras

    def record(self) -> list[float]:
        return [self.log.count]


class TensorHook(Part):
    """A hook on the activation's gradient that changes it, or counts."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.log = SimpleNamespace(count=0)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        y = 1.0 * x
        if y.requires_grad:
            y.register_hook(self._changed if self.number % 2 else self._counted)
        return y, extras

    def _changed(self, grad: torch.Tensor) -> torch.Tensor:
        return 0.5 * grad

    def _counted(self, grad: torch.Tensor) -> None:
        self.log.count += 1

    def record(self) -> list[float]:
        return [self.log.count]


class GradHook(Part):
    """A hook on a parameter's gradient before accumulation that scales or clamps it."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.factor = nn.Parameter(1 + torch.randn(width, dtype=torch.float64) / 5)
        self.factor.register_hook((lambda g: 0.5 * g, lambda g: g.clamp(-0.01, 0.01))[number % 2])

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return x * self.factor, extras


class PostHook(Part):
    """A post-accumulate-grad hook that scales the gradient, or sums the gradients that it sees."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.factor = nn.Parameter(1 + torch.randn(width, dtype=torch.float64) / 5)
        self.log = SimpleNamespace(total=0.0)
        log, way = self.log, number % 2

        def after(parameter: torch.Tensor) -> None:
            if way == 0:
                parameter.grad.mul_(0.5)
            else:
                log.total += float(parameter.grad.sum())

        self.factor.register_post_accumulate_grad_hook(after)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return x * self.factor, extras

    def record(self) -> list[float]:
        return [self.log.total]
