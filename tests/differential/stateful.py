"""Parts with state (attributes, plain objects, caches, buffers), and parts that draw random numbers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from differential.layers import Extras, Part

__all__ = ["Cache", "Dropout", "KeptOutput", "LayerDrop", "Memory", "MovedWeight", "RunningMean"]


class Memory(Part):
    """Adds a value from its last forward."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.way = number % 4
        zero = torch.zeros((), dtype=torch.float64)
        self.last: Any = (zero, [zero], {"last": zero}, SimpleNamespace(last=zero))[self.way]

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        last, now = self.get(), x.detach().mean()
        if self.way == 0:
            self.last = now
        elif self.way == 1:
            self.last[:] = [now]
        elif self.way == 2:
            self.last["last"] = now
        else:
            self.last.last = now
        return x + 0.5 * last, extras

    def get(self) -> Any:
        if self.way == 0:
            return self.last
        return self.last.last if self.way == 3 else self.last[0 if self.way == 1 else "last"]

    def record(self) -> list[float]:
        return [float(self.get())]


_TABLES: dict[tuple[int, int], torch.Tensor] = {}


class Cache(Part):
    """Caches a table for each number of rows, as rotary embeddings do."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.tables = SimpleNamespace(by_rows={})
        self.made = SimpleNamespace(count=0)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        rows = len(x)
        tables = (self.tables.by_rows, self.__dict__.setdefault("own", {}), _TABLES)[self.number % 3]
        key = (self.number, rows)
        if key not in tables:
            tables[key] = torch.linspace(0.5, 1.5, rows, dtype=torch.float64).unsqueeze(1)
            self.made.count += 1
        return x * tables[key], extras

    def record(self) -> list[float]:
        return [] if self.number % 3 == 2 else [self.made.count]


class RunningMean(Part):
    """Updates a running mean, and counts in a buffer, an attribute and a plain object."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64), persistent=number % 3 != 0)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.calls = 0
        self.log = SimpleNamespace(calls=0)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        if self.training:
            self.calls += 1
            self.log.calls += 1
            self.count += 1
            self.mean.mul_(0.75).add_(x.detach().mean(0), alpha=0.25)
        return x - self.mean, extras

    def record(self) -> list[float]:
        return [self.calls, self.log.calls]


class KeptOutput(Part):
    """Adds an output that it keeps and modifies in its next forward."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        kept = torch.zeros(width, dtype=torch.float64)
        self.holder = SimpleNamespace(kept=kept)
        if number % 2:
            self.register_buffer("kept", kept)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        kept = self.kept if self.number % 2 else self.holder.kept
        kept.add_(x.detach().mean(0))
        return x, [*extras, kept if self.number % 4 < 2 else kept.view(2, -1)]


class MovedWeight(Part):
    """Returns a parameter that its own forward modifies, as weight clipping does."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.place = self.weight(width)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        with torch.no_grad():
            self.place.mul_(0.875)
        given = self.place if self.number % 2 else self.place.unsqueeze(0)
        return x, [*extras, given]


class Dropout(Part):
    """Draws from torch's generator."""

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return nn.functional.dropout(x, 0.25, self.training), extras


class LayerDrop(Part):
    """Skips its layer at random, with Python's, NumPy's or PyTorch's generator."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.layer = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        drawn = random.random() if self.number % 2 else np.random.rand()
        return (torch.tanh(self.layer(x)) if drawn < 0.5 else x), extras
