"""What a hop carries, in figures: shape, dtype and whether a gradient comes back. Never values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = ["HopSpecs", "TensorSpec", "describe", "first_difference", "specs_of"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a hop. ``requires_grad`` means that the receiver sends a gradient of it back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def without_grad(self) -> TensorSpec:
        return replace(self, requires_grad=False)

    def to_json(self) -> list[Any]:
        """``[[4, 8], "float32", true]``."""
        return [list(self.shape), str(self.dtype).removeprefix("torch."), self.requires_grad]

    @classmethod
    def from_json(cls, data: Any) -> TensorSpec:
        """Read what ``to_json`` gives. It comes from another rank: raises ValueError if it is not a spec."""
        match data:
            case [[*shape], str(name), bool(requires_grad)] if all(type(n) is int and n >= 0 for n in shape):
                dtype = getattr(torch, name, None)
                if isinstance(dtype, torch.dtype):
                    return cls(tuple(shape), dtype, requires_grad)
        raise ValueError(f"expected a tensor spec such as [[4, 8], 'float32', true], got {data!r}")

    def __str__(self) -> str:
        grad = " with grad" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{grad}"


HopSpecs = tuple[TensorSpec, ...]


def specs_of(tensors: Sequence[torch.Tensor]) -> HopSpecs:
    """The spec of each tensor."""
    return tuple(TensorSpec.of(tensor) for tensor in tensors)


def describe(specs: Sequence[TensorSpec]) -> str:
    """``float32[4, 8] with grad, int64[3]``; ``nothing`` for an empty hop."""
    return ", ".join(map(str, specs)) or "nothing"


def first_difference(expected: Sequence[TensorSpec], got: Sequence[TensorSpec]) -> str | None:
    """Where ``got`` is not what was agreed, as the second half of an error text; None if it is.

    A tensor that was announced with a gradient and has none is no difference: its gradient comes and is dropped.
    """
    if len(expected) != len(got):
        return (
            f"{len(expected)} tensors were agreed ({describe(expected)}), it has {len(got)} ({describe(got)})"
        )
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        if (want.shape, want.dtype) != (have.shape, have.dtype):
            return f"tensor {index} was agreed as {want}, it is {have}"
        if have.requires_grad and not want.requires_grad:
            return (
                f"tensor {index} requires a gradient, but was agreed as {want}; if layers were unfrozen since "
                "the last step, call pipeline.forget_shapes() on every rank"
            )
    return None
