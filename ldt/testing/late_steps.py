"""Runs steps with known gradients on chunks that overwrite tensors as soon as they have been handed to a send."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ldt
from ldt.runtime import Mesh
from ldt.testing.late_sends import each_kind_at_once, hold_sends
from ldt.topology import Topology

__all__ = ["late_steps"]

_MICROBATCHES = 4
_FACTORS = [10.0**m for m in range(_MICROBATCHES)]  # of the gradients; a parameter's gradient is their mean
_MEAN = sum(_FACTORS) / _MICROBATCHES


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


class _Position(nn.Module):
    """Keeps its output, which the next forward zeroes. Its gradient shares memory with the one that is sent."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.zeros(rows, width))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None:
            with torch.no_grad():
                self.kept.zero_()
        self.kept = x + self.pos.unsqueeze(0)
        return self.kept


def late_steps(
    mesh: Mesh, rows: int, width: int, *, split: bool, held: bool, steps: int = 1, error: float = 0.0
) -> None:
    """Run ``steps`` with activations [1, rows, width]; assert losses, within a relative ``error``, and gradients.

    ``split`` splits the backwards; ``held`` delays sends as long as possible.
    """
    plan = each_kind_at_once(Topology([1, 1]), _MICROBATCHES, split)
    ones = torch.ones(1, rows, width)
    batch = [(ones.to(mesh.device), (factor * ones).to(mesh.device)) for factor in _FACTORS]
    chunks: list[Any] = [_Scale(width), nn.Identity()] if mesh.is_edge else [_Position(rows, width)]
    chunks = [chunk.to(mesh.device) for chunk in chunks]
    pipeline = ldt.Pipeline(chunks, mesh, plan, _dot if mesh.is_edge else None)
    for step in range(-1, steps):
        for chunk in chunks:
            chunk.zero_grad()
            chunk.kept = None
        if held and step >= 0:  # the first call on a device launches its sends on demand, and waits for them
            hold_sends(mesh)
        losses = pipeline.step(batch if mesh.is_edge else None).losses
        if mesh.is_edge:
            expected = torch.tensor(_FACTORS) * rows * width
            found = torch.tensor([loss.item() for loss in losses or ()])
            torch.testing.assert_close(found, expected, rtol=error, atol=0.0)
            assert set(chunks[0].w.grad.tolist()) == {_MEAN * rows}
        else:
            assert chunks[0].pos.grad.cpu().unique().tolist() == [_MEAN]


def _dot(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()
