"""Parts with weights of other dtypes than the activations: float32, which autocast casts to bfloat16, and complex."""

from __future__ import annotations

import torch
from torch import nn

from differential.layers import Extras, Part

__all__ = ["Complex", "Single"]


class Single(Part):
    """A layer in float32."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.layer = nn.Linear(width, width, dtype=torch.float32)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return x + self.layer(x.float()).to(x.dtype), extras


class Complex(Part):
    """Multiplies pairs of columns, viewed as complex numbers, with a complex parameter."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.factor = nn.Parameter(torch.randn(width // 2, dtype=torch.complex128))

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        pairs = torch.view_as_complex(x.contiguous().view(len(x), -1, 2))
        return torch.view_as_real(pairs * self.factor).flatten(1), extras
