"""Builds the chunks, loss, optimizer and samples of a job, equal in every process."""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from differential import dtypes, functions, layers, ranks, side_tensors, stateful
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
    for module in (layers, side_tensors, stateful, functions, dtypes, ranks)
    for name in module.__all__
    if name != "Part"
}
ON_EVERY_STAGE = ("attention_mask",)  # keyword inputs; the others stay on the edge
Microbatches = list[tuple[Any, torch.Tensor]]


class Chunk(nn.Module):
    """Runs parts in sequence, then a layer that another chunk may share."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.tied: nn.Module | None = None

    def forward(
        self,
        x: torch.Tensor,
        *side_tensors: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        gain: float = 1.0,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        extras = list(side_tensors)
        if attention_mask is not None:
            x = gain * torch.where(attention_mask, x, 0.5 * x)
        for part in self.parts:
            x, extras = part(x, extras)
        if self.tied is not None:
            x = self.tied(x)
        return (x, *extras) if extras else x

    def record(self) -> list[float]:
        """Return the counters of its parts."""
        return [number for part in self.parts for number in part.record()]


class NamedChunk(Chunk):
    """A chunk that provides its names in the whole model."""

    def __init__(self, parts: Iterable[nn.Module], index: int) -> None:
        super().__init__(parts)
        self.index = index

    def whole_model_name(self, name: str) -> str:
        return name if name.startswith("tied.") else f"chunks.{self.index}.{name}"


class Loss(nn.Module):
    """Mean squared error, or with "token" the sum over columns and the number of rows."""

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
    """Build all chunks of the model; ``variation`` changes the weights."""
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
    """Return an optimizer; None if there is nothing to train.

    eps is large, so that rounding does not become a step where the true gradient is zero.
    """
    params = list(parameters)
    if not params:
        return None
    match job.optimizer:
        case "adamw":
            return torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1)
        case "groups":
            groups = [
                {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in params if p.dim() <= 1], "lr": 0.02, "betas": (0.8, 0.9)},
            ]
            return torch.optim.AdamW(groups, lr=0.01, eps=1e-3, weight_decay=0.0, amsgrad=True)
        case "adagrad":
            return torch.optim.Adagrad(params, lr=0.02, eps=1e-3)
        case "rmsprop":
            return torch.optim.RMSprop(params, lr=0.005, eps=1e-3, momentum=0.5, centered=True)
    return torch.optim.SGD(params, lr=0.05, momentum=0.9 if job.optimizer == "momentum" else 0.0)


def microbatches(job: Job, call: int, replica: int) -> Microbatches:
    """Return the microbatches of an edge replica for a call."""
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
    """Seed the generators of PyTorch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def values_of(
    chunks: Mapping[str, nn.Module], gradients: bool, group: Any = None
) -> dict[str, torch.Tensor | None]:
    """Copy gradients, or parameters, buffers and records, by the chunk's name and theirs in it.

    Sharded tensors are gathered in ``group``.
    """
    found: dict[str, torch.Tensor | None] = {}
    for label, chunk in chunks.items():
        for name, parameter in chunk.named_parameters():
            grad = parameter.grad
            if gradients:
                whole = None if grad is None else whole_of(parameter, grad, group).clone()
                found[f"gradient of {label}.{name}"] = whole
            else:
                whole = whole_of(parameter, parameter.detach(), group)
                found[f"parameter {label}.{name}"] = whole.clone()
        if not gradients:
            found |= {f"buffer {label}.{name}": buffer.clone() for name, buffer in chunk.named_buffers()}
            if isinstance(chunk, Chunk):
                found[f"what {label} counted"] = torch.tensor(chunk.record(), dtype=torch.float64)
    return found


def next_random_numbers() -> torch.Tensor:
    """Draw from each generator: the numbers show which rank has drawn before."""
    return torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))])


def _part(item: Item, *seeds: int) -> nn.Module:
    torch.manual_seed(_number(item, *seeds))
    part: nn.Module = PARTS[item.kind](WIDTH, item.number)
    return part


def _number(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())
