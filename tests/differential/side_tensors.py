"""Parts that add, use or drop side tensors, which travel with the activation: any dtype, aliases, parameters."""

from __future__ import annotations

from typing import Any

import torch

from differential.layers import Extras, Part

__all__ = ["Absorb", "Alias", "Branch", "Detach", "Drop", "Emit", "EmitOwn", "OddDetach", "StaticOutput"]


class Emit(Part):
    """Adds an output: of another dtype, with or without a gradient, empty, or a scalar."""

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        ways = (
            lambda: (x.detach() * 4).to(torch.int64),
            lambda: x.detach() > 0,
            lambda: x.to(torch.bfloat16),
            lambda: torch.complex(x, 2 * x),
            lambda: x.to(torch.float32),
            lambda: x.detach().half(),
            lambda: x[:0] * 2,
            lambda: x.mean((0, 1)),
            lambda: (x.detach() * 4).to(torch.uint8),
            lambda: torch.arange(self.width).unsqueeze(1).expand(-1, 2),
            lambda: torch.complex(x, x).detach(),
            lambda: torch.t(2 * x),
        )
        return x, [*extras, ways[self.number % len(ways)]()]


class Branch(Part):
    """Adds an output computed with its own parameter, which has no gradient if no part uses the output."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.factor = self.weight(width)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        source = x if self.number % 2 else torch.ones_like(x)
        return x, [*extras, source * self.factor]


class Absorb(Part):
    """Uses all side tensors, or all but the first."""

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        kept = extras[: self.number % 4 == 1]
        for extra in extras[len(kept) :]:
            real = extra.real + 0.5 * extra.imag if extra.is_complex() else extra
            if real.numel():
                same = real.shape == x.shape
                x = x + 0.25 * (real.double() if same else real.double().mean())
        return x, kept


class Drop(Part):
    """Leaves the last side tensor unused."""

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return x, extras[:-1]


class Alias(Part):
    """Adds an output that shares memory with the first."""

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        ways = (
            lambda: x,
            lambda: x.view(-1) if x.is_contiguous() else x.t(),
            lambda: torch.t(x),
            lambda: x[:, :2],
            lambda: torch.detach(x),
        )
        return x, [*extras, ways[self.number % len(ways)]()]


class EmitOwn(Part):
    """Adds an output that the module owns: a parameter, a view of one, or a buffer."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.own = self.weight(width)
        self.register_buffer("table", torch.randn(width, dtype=torch.float64))

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        ways = (
            lambda: self.own,
            lambda: self.own.expand(x.shape),
            lambda: self.own.view(2, -1),
            lambda: self.table,
            lambda: torch.detach(self.own),
        )
        return x, [*extras, ways[self.number % len(ways)]()]


class Detach(Part):
    """Detaches: the parts before get no gradient."""

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return (x.detach() if self.number % 2 else x.detach() + 0.1), extras


class OddDetach(Part):
    """Detaches in every other forward."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.calls = 0

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        self.calls += 1
        return (x.detach() if self.calls % 2 else x), extras

    def record(self) -> list[float]:
        return [self.calls]


class _IntoStatic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return memory.copy_(2 * x).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 2 * grad, None


class StaticOutput(Part):
    """Computes into static memory, as a CUDA graph does: the next forward overwrites it."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.memory: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        memory = self.memory.setdefault(len(x), torch.zeros(len(x), self.width, dtype=torch.float64))
        return _IntoStatic.apply(x, memory), extras
