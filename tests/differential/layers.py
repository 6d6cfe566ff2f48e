"""Parts that compute: layers, parameters, views, in-place operations, checkpoints."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = [
    "Affine",
    "Checkpointed",
    "InPlace",
    "Mlp",
    "Part",
    "Position",
    "Scale",
    "Twice",
    "Unused",
    "Views",
]

Extras = list[torch.Tensor]


class Part(nn.Module):
    """Takes and returns [rows, width] in float64, and side tensors. Weights are drawn on the CPU."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.width = width
        self.number = number

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return x, extras

    def record(self) -> list[float]:
        """Return its counters, to be compared."""
        return []

    def weight(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, dtype=torch.float64) / 3)


class Affine(Part):
    """A linear layer."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.layer = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return self.layer(x), extras


class Mlp(Part):
    """A block with a norm, a non-linearity and a residual."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        dtype = torch.float64
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width, dtype=dtype),
            (nn.Tanh, nn.GELU, nn.ReLU)[number % 3](),
            nn.Linear(2 * width, width, dtype=dtype),
        )

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return x + self.layers(self.norm(x)), extras


class Scale(Part):
    """Multiplies with a vector, or with one whose gradient is exactly zero."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.factor = nn.Parameter(1 + torch.randn(width, dtype=torch.float64) / 5)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return (x * self.factor if self.number % 3 else x + 0.0 * self.factor), extras


class Position(Part):
    """Adds a view of a parameter: with one row, ``.grad`` shares memory with the incoming gradient."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.way = number % 5
        self.position = self.weight(width, 1) if self.way == 4 else self.weight(width)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        ways = (
            lambda p: p.unsqueeze(0),
            lambda p: p.view(1, -1),
            lambda p: p.expand(x.shape),
            lambda p: p[None, :],
            lambda p: p.t(),
        )
        return x + ways[self.way](self.position), extras


class Views(Part):
    """Returns the same values in another layout."""

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        rows, width = x.shape
        ways = (
            lambda: x.t().contiguous().t(),
            lambda: x.reshape(rows, 2, width // 2).transpose(1, 2).reshape(rows, width),
            lambda: torch.cat([x, x], 1)[:, ::2],
            lambda: x.unsqueeze(0).expand(2, rows, width)[1],
            lambda: torch.cat([x, x])[rows:],
            lambda: x.view_as(x),
            lambda: x.flip(1),
            lambda: x.sum(1, keepdim=True).expand(rows, width),
        )
        return ways[self.number % len(ways)](), extras


class InPlace(Part):
    """Modifies its input in place, or a part or a view of it."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.shift = self.weight(width)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        way = self.number % 5
        if way == 0:
            x.mul_(1.5)
        elif way == 1:
            x.add_(self.shift)
        elif way == 2:
            x[:, :1].mul_(0.5)
        elif way == 3:
            x.t().add_(0.25)
        else:
            x = nn.functional.relu(x + 1.0, inplace=True)
        return x, extras


class Twice(Part):
    """Applies one layer twice."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.layer = nn.Linear(width, width, bias=number % 2 == 0, dtype=torch.float64)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return self.layer(torch.tanh(self.layer(x))), extras


class Checkpointed(Part):
    """A block that torch.utils.checkpoint recomputes in the backward: reentrant or not, with and without dropout."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.reentrant = number % 2 == 1
        self.rate = 0.5 if number % 4 > 1 else 0.0
        self.layer = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return x + checkpoint(self.block, x, use_reentrant=self.reentrant), extras

    def block(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.tanh(self.layer(x))
        return nn.functional.dropout(found, self.rate) if self.rate else found


class Unused(Part):
    """A parameter that no forward uses."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.idle = self.weight(width)
