"""Parts whose behavior depends on the rank within the stage."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from differential.layers import Extras, Part

__all__ = ["Parallel", "Uneven"]


class Uneven(Part):
    """Differs between the ranks of a stage, like layers that keep a part of the sequence each."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.rank = 0

    def set_rank(self, rank: int, size: int, group: Any) -> None:
        """Set the rank. Called by the builder."""
        self.rank = rank

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return (1 + self.rank) * x, extras


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        if not isinstance(x, FakeTensor):
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Parallel(Part):
    """Two layers whose hidden units are split over the ranks of a stage, as in Megatron-LM."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.up, self.down = self.weight(2 * width, width), self.weight(width, 2 * width)
        self.group: Any = None

    def set_rank(self, rank: int, size: int, group: Any) -> None:
        """Shard the layers if there is more than one rank."""
        if size == 1:
            return
        self.group = group
        for name, dim in (("up", 0), ("down", 1)):
            whole = getattr(self, name)
            part = nn.Parameter(whole.detach().chunk(size, dim)[rank].clone(), whole.requires_grad)
            part.tensor_model_parallel, part.partition_dim = True, dim  # type: ignore[attr-defined]
            setattr(self, name, part)

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        inputs = x if self.group is None else _SumGradients.apply(x, self.group)
        y = torch.tanh(inputs @ self.up.t()) @ self.down.t()
        return x + (y if self.group is None else _Sum.apply(y, self.group)), extras


def whole_of(parameter: torch.Tensor, tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Gather ``tensor``, the value or gradient of ``parameter``, from all ranks of the stage."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, parameter.partition_dim)  # type: ignore[attr-defined]
