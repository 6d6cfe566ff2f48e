"""Compute to hide transfers behind: GEMMs that fill a GPU, or one CPU core."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from clock import Stopwatch, settle

__all__ = ["LOADS", "Gemms", "GemmsKind"]


@dataclass(frozen=True)
class GemmsKind:
    """A number of products of two square matrices."""

    count: int
    dtype: torch.dtype
    size: int

    @property
    def name(self) -> str:
        return f"{self.count} {str(self.dtype).removeprefix('torch.')} {self.size}"


LOADS = {
    "cuda": (GemmsKind(24, torch.bfloat16, 4096), GemmsKind(12, torch.float32, 2048)),
    "cpu": (GemmsKind(4, torch.float32, 512),),
}


@dataclass
class Gemms:
    """Launches ``kind.count`` GEMMs on the current stream when called.

    The matrices are random, since the chip's power draw depends on their values.
    """

    kind: GemmsKind
    device: torch.device

    def __post_init__(self) -> None:
        size = (self.kind.size, self.kind.size)
        self._left, self._right = (
            torch.randn(size, dtype=self.kind.dtype, device=self.device) for _ in range(2)
        )
        self._product = torch.empty_like(self._left)

    def __call__(self) -> None:
        for _ in range(self.kind.count):
            torch.mm(self._left, self._right, out=self._product)

    def time_of_one(self) -> float:
        """Return the seconds of the fastest of five calls."""
        watch, times = Stopwatch(self.device), []
        for _ in range(6):
            settle(self.device)
            watch.start()
            self()
            times.append(watch.stop())
        return min(times[1:]) / self.kind.count
