"""Chunks, loss, optimizer and samples of a job: equal wherever they are made."""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from differential import beside, dtypes, functions, layers, ranks, stateful
from differential.ranks import whole_of
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
    for module in (layers, beside, stateful, functions, dtypes, ranks)
    for name in module.__all__
    if name != "Part"
}
ON_EVERY_STAGE = ("attention_mask",)  # of inputs by name; the others are for the edge alone
Microbatches = list[tuple[Any, torch.Tensor]]


class Chunk(nn.Module):
    """Parts one after the other, and behind them a layer that another chunk may have as well."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.tied: nn.Module | None = None

    def forward(
        self,
        x: torch.Tensor,
        *beside: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        gain: float = 1.0,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        extras = list(beside)
        if attention_mask is not None:
            x = gain * torch.where(attention_mask, x, 0.5 * x)
        for part in self.parts:
            x, extras = part(x, extras)
        if self.tied is not None:
            x = self.tied(x)
        return (x, *extras) if extras else x

    def record(self) -> list[float]:
        """What its parts have counted."""
        return [number for part in self.parts for number in part.record()]


class NamedChunk(Chunk):
    """One that knows what its tensors are called in the whole model."""

    def __init__(self, parts: Iterable[nn.Module], index: int) -> None:
        super().__init__(parts)
        self.index = index

    def whole_model_name(self, name: str) -> str:
        return name if name.startswith("tied.") else f"chunks.{self.index}.{name}"


class Loss(nn.Module):
    """Squared errors, their mean, or with "token" their sum over columns and the number of rows."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.reduction = job.reduction
        weight = torch.full((WIDTH,), 1.25, dtype=torch.float64)
        self.weight: torch.Tensor | None = None
        if job.loss == "Weighted":
            self.weight = nn.Parameter(weight)
        elif job.loss == "Hidden":  # requires a gradient, and is no parameter
            self.weight = weight.requires_grad_()

    def forward(
        self, output: torch.Tensor | tuple[torch.Tensor, ...], target: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, int]:
        x = output[0] if isinstance(output, tuple) else output
        errors = (x if self.weight is None else x * self.weight) - target
        return (errors.pow(2).sum(), len(target)) if self.reduction == "token" else errors.pow(2).mean()


def build(job: Job, variation: int = 0) -> list[Chunk]:
    """All chunks of the model, with weights that ``variation`` changes."""
    with torch.random.fork_rng(devices=[]):
        every = [
            [_part(item, job.seed, index, variation) for item in items]
            for index, items in enumerate(job.chunks)
        ]
        chunks = [
            NamedChunk(parts, index) if job.names else Chunk(parts) for index, parts in enumerate(every)
        ]
        for first, second in job.ties:
            torch.manual_seed(_number(job.seed, first, second, variation))
            layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            chunks[first].tied = layer
            chunks[second].tied = layer if not job.torn else copy.deepcopy(layer)
            if job.torn == "other":
                chunks[second].tied.reset_parameters()
    for index in job.frozen:
        chunks[index].requires_grad_(False)
    return chunks


def make_optimizer(job: Job, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """None where there is nothing to train.

    A large eps: where the true gradient is zero, a sum in another order must not become a step.
    """
    mine = list(parameters)
    if not mine:
        return None
    match job.optimizer:
        case "adamw":
            return torch.optim.AdamW(mine, lr=0.01, eps=1e-3, weight_decay=0.1)
        case "groups":
            groups = [
                {"params": [p for p in mine if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in mine if p.dim() <= 1], "lr": 0.02, "betas": (0.8, 0.9)},
            ]
            return torch.optim.AdamW(groups, lr=0.01, eps=1e-3, weight_decay=0.0, amsgrad=True)
        case "adagrad":
            return torch.optim.Adagrad(mine, lr=0.02, eps=1e-3)
        case "rmsprop":
            return torch.optim.RMSprop(mine, lr=0.005, eps=1e-3, momentum=0.5, centered=True)
    return torch.optim.SGD(mine, lr=0.05, momentum=0.9 if job.optimizer == "momentum" else 0.0)


def microbatches(job: Job, call: int, replica: int) -> Microbatches:
    """Those of an edge replica for a call."""
    generator = torch.Generator().manual_seed(_number(job.seed, call, replica))
    shapes = ((2, rows, WIDTH) for rows in job.calls[call].batches)
    pairs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if pairs and job.calls[call].overflows:
        pairs[0][1, 0, 0] = torch.inf
    found: Microbatches = [(pair[0].clone(), pair[1].clone()) for pair in pairs]
    if job.inputs == "dict":
        return [
            ({"x": x, "attention_mask": torch.rand(x.shape, generator=generator) < 0.75, "gain": 1.5}, target)
            for x, target in found
        ]
    return found


def seed_everything(seed: int) -> None:
    """Torch's, Python's and NumPy's random numbers."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def values_of(
    chunks: Mapping[str, nn.Module], gradients: bool, group: Any = None
) -> dict[str, torch.Tensor | None]:
    """Copies of gradients, or of parameters, buffers and records, by the chunk's name and theirs in it.

    What the ranks of a stage have parts of is gathered in ``group``.
    """
    found: dict[str, torch.Tensor | None] = {}
    for place, chunk in chunks.items():
        for name, parameter in chunk.named_parameters():
            grad = parameter.grad
            if gradients:
                whole = None if grad is None else whole_of(parameter, grad, group).clone()
                found[f"gradient of {place}.{name}"] = whole
            else:
                whole = whole_of(parameter, parameter.detach(), group)
                found[f"parameter {place}.{name}"] = whole.clone()
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
