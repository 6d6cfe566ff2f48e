"""Chunks, loss, optimizer and samples of a job: equal wherever they are made."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import nn

from differential import beside, functions, layers, stateful
from differential.spec import Item, Job

__all__ = [
    "WIDTH",
    "Chunk",
    "Loss",
    "Microbatches",
    "build",
    "make_optimizer",
    "microbatches",
    "seed_everything",
]

WIDTH = 4
PARTS = {
    name: getattr(module, name)
    for module in (layers, beside, stateful, functions)
    for name in module.__all__
    if name != "Part"
}
Microbatches = list[tuple[torch.Tensor, torch.Tensor]]


class Chunk(nn.Module):
    """Parts one after the other, and behind them a layer that another chunk may have as well."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.tied: nn.Module | None = None

    def forward(self, x: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        extras = list(beside)
        for part in self.parts:
            x, extras = part(x, extras)
        if self.tied is not None:
            x = self.tied(x)
        return (x, *extras) if extras else x

    def record(self) -> list[float]:
        """What its parts have counted."""
        return [number for part in self.parts for number in part.record()]


class Loss(nn.Module):
    """Squared errors, their mean, or with "token" their sum over columns and the number of rows."""

    def __init__(self, reduction: str, weighted: bool) -> None:
        super().__init__()
        self.reduction = reduction
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.25, dtype=torch.float64)) if weighted else None

    def forward(
        self, output: torch.Tensor | tuple[torch.Tensor, ...], target: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, int]:
        x = output[0] if isinstance(output, tuple) else output
        errors = (x if self.weight is None else x * self.weight) - target
        return (errors.pow(2).sum(), len(target)) if self.reduction == "token" else errors.pow(2).mean()


def build(job: Job, variation: int = 0) -> list[Chunk]:
    """All chunks of the model, with weights that ``variation`` changes."""
    with torch.random.fork_rng(devices=[]):
        chunks = [
            Chunk(_part(item, job.seed, index, variation) for item in items)
            for index, items in enumerate(job.chunks)
        ]
        for first, second in job.ties:
            torch.manual_seed(_number(job.seed, first, second, variation))
            layer = chunks[first].tied or nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            chunks[first].tied = chunks[second].tied = layer
    for index in job.frozen:
        chunks[index].requires_grad_(False)
    return chunks


def make_optimizer(job: Job, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """None where there is nothing to train."""
    mine = list(parameters)
    if not mine:
        return None
    if job.optimizer == "adamw":
        # A large eps: where the true gradient is zero, a sum in another order must not become a step.
        return torch.optim.AdamW(mine, lr=0.01, eps=1e-3, weight_decay=0.1)
    return torch.optim.SGD(mine, lr=0.05, momentum=0.9 if job.optimizer == "momentum" else 0.0)


def microbatches(job: Job, call: int, replica: int) -> Microbatches:
    """Those of an edge replica for a call."""
    generator = torch.Generator().manual_seed(_number(job.seed, call, replica))
    shapes = ((2, rows, WIDTH) for rows in job.calls[call].batches)
    pairs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [(pair[0].clone(), pair[1].clone()) for pair in pairs]


def seed_everything(seed: int) -> None:
    """Torch's, Python's and NumPy's random numbers."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def values_of(chunks: Mapping[str, nn.Module], gradients: bool) -> dict[str, torch.Tensor | None]:
    """Copies of gradients, or of parameters, buffers and records, by the chunk's name and theirs in it."""
    found: dict[str, torch.Tensor | None] = {}
    for place, chunk in chunks.items():
        for name, parameter in chunk.named_parameters():
            grad = parameter.grad
            if gradients:
                found[f"gradient of {place}.{name}"] = None if grad is None else grad.clone()
            else:
                found[f"parameter {place}.{name}"] = parameter.detach().clone()
        if not gradients:
            found |= {f"buffer {place}.{name}": buffer.clone() for name, buffer in chunk.named_buffers()}
            if isinstance(chunk, Chunk):
                found[f"what {place} counted"] = torch.tensor(chunk.record(), dtype=torch.float64)
    return found


def next_random_numbers() -> torch.Tensor:
    """Of each generator: they tell who has drawn."""
    return torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))])


def _part(item: Item, *seeds: int) -> nn.Module:
    torch.manual_seed(_number(item, *seeds))
    part: nn.Module = PARTS[item.kind](WIDTH, item.number)
    return part


def _number(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())
