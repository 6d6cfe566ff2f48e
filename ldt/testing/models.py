"""Toy models and batches, and the unsplit step to compare a pipeline with."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ldt.topology import Topology

__all__ = [
    "SleepingChunk",
    "ToyChunk",
    "on_backward",
    "toy_chunks",
    "toy_loss",
    "toy_microbatches",
    "unsplit_step",
]


class ToyChunk(nn.Module):
    """A few layers on [batch, width] whose backward needs its inputs and outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual: torch.Tensor = self.second(torch.tanh(self.norm(self.first(x))))
        return x + residual


class _OnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Callable[[], object]) -> torch.Tensor:
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.act()
        return grad, None


def on_backward(x: torch.Tensor, act: Callable[[], object]) -> torch.Tensor:
    """Return ``x`` with a backward that first calls ``act``."""
    same: torch.Tensor = _OnBackward.apply(x, act)  # type: ignore[no-untyped-call]
    return same


class SleepingChunk(ToyChunk):
    """A chunk whose forward and whose half backwards (input, weights) take the given number of seconds.

    It sleeps, like a host that waits for an accelerator, so any number of ranks can compute on one core.
    """

    def __init__(self, width: int, forward: float, half_backward: float) -> None:
        super().__init__(width)
        self.seconds = forward
        self.half_backward = half_backward
        self.pace = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:  # not during shape inference
            time.sleep(self.seconds)
        sleep = partial(time.sleep, self.half_backward)
        output = on_backward(super().forward(x), sleep)
        late = on_backward(self.pace, sleep)
        return output + late


def toy_chunks(topology: Topology, width: int = 16, seed: int = 0) -> list[nn.Module]:
    """Return all chunks of a toy model, the same on every rank."""
    torch.manual_seed(seed)
    return [ToyChunk(width) for _ in range(topology.num_chunks)]


def toy_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    loss: torch.Tensor = nn.functional.mse_loss(output, target)
    return loss


def toy_microbatches(
    number: int, width: int = 16, batch: int = 4, seed: int = 1
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ``number`` pairs of [batch, width] tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (number, 2, batch, width)
    return [(pair[0], pair[1]) for pair in torch.randn(shape, generator=generator)]


def unsplit_step(
    chunks: Sequence[nn.Module],
    microbatches: Sequence[tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], torch.Tensor],
) -> tuple[list[torch.Tensor], list[nn.Module]]:
    """Return the reference for ``Pipeline.step``: the losses, and copies of ``chunks`` with their gradients."""
    model = copy.deepcopy(nn.ModuleList(chunks))
    losses = []
    for inputs, target in microbatches:
        output = inputs
        for chunk in model:
            if isinstance(output, dict):
                output = chunk(**output)
            else:
                output = chunk(*output) if isinstance(output, (tuple, list)) else chunk(output)
        loss = loss_fn(output, target)
        torch.autograd.backward(loss / len(microbatches))
        losses.append(loss.detach())
    return losses, list(model)


def unsplit_training(topology: Topology, steps: int, num_microbatches: int) -> list[nn.Module]:
    """Toy chunks of the unsplit model after ``steps`` of AdamW (1e-2), each on ``toy_microbatches(seed=step)``."""
    chunks = toy_chunks(topology)
    optimizer = torch.optim.AdamW(nn.ModuleList(chunks).parameters(), lr=1e-2)
    for step in range(steps):
        for inputs, target in toy_microbatches(num_microbatches, seed=step):
            loss = toy_loss(nn.Sequential(*chunks)(inputs), target)
            torch.autograd.backward(loss / num_microbatches)
        optimizer.step()
        optimizer.zero_grad()
    return chunks
