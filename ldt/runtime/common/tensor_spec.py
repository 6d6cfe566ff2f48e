"""Describes the tensors of a hop: shape, dtype and whether a gradient comes back. Never values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

__all__ = [
    "MARK_DTYPE",
    "HopSpecs",
    "TensorSpec",
    "backward_specs",
    "describe",
    "first_difference",
    "is_mark",
    "specs_of",
]


MARK_DTYPE = torch.uint8


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a hop.

    Attributes:
        shape: Of the whole tensor, also where it is sharded.
        dtype: Element type.
        requires_grad: Whether the tensor may require a gradient, which the receiver then sends back.
        order: Memory layout: the dimensions from outermost to innermost, empty for the default order. The tensor and
            its gradient travel and arrive in this order, since kernels may sum in memory order. A tensor whose elements
            do not fill its memory (a slice, an expanded tensor) has the default order and arrives contiguous.
        shard: The dimension split over the ranks of each stage (see ``ldt.runtime.comm.shards``), or None if every
            rank has the whole tensor.
        used: Whether the next chunk's backward uses the tensor. False: no gradient is sent back. None: it depends on
            the microbatch.
        decisive: Whether a reentrant checkpoint behind the hop trains its layers only if this tensor requires a
            gradient. Every rank derives ``used`` and ``decisive`` itself; they are not sent.
        kept: Whether the tensor is not sent, but kept for the next chunk of its node (``ldt.keep``).
        auxiliary: The names of the losses in a tensor of auxiliary losses, empty for all others. Not sent either.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    order: tuple[int, ...] = ()
    shard: int | None = None
    used: bool | None = True
    decisive: bool = False
    kept: bool = False
    auxiliary: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, _order_of(tensor))

    def without_grad(self) -> TensorSpec:
        """The spec in a forward-only step."""
        return replace(self, requires_grad=False)

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    # -- on the wire -----------------------------------------------------------------------------------------

    @property
    def wire_shape(self) -> tuple[int, ...]:
        """The shape in memory order."""
        return tuple(self.shape[dim] for dim in self.order) if self.order else self.shape

    def to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of ``tensor`` in memory order; contiguous if its layout is the agreed one."""
        return tensor.permute(self.order) if self.order else tensor

    def from_wire(self, received: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of ``received``, which has ``wire_shape``."""
        if not self.order:
            return received
        return received.permute([self.order.index(dim) for dim in range(len(self.order))])

    # -- as text ---------------------------------------------------------------------------------------------

    def to_json(self) -> list[Any]:
        """Shape, dtype, requires_grad, order and shard: ``[[4, 8], "float32", true, [], null]``.

        If it is kept, true follows.
        """
        return [
            list(self.shape),
            str(self.dtype).removeprefix("torch."),
            self.requires_grad,
            list(self.order),
            self.shard,
            *([True] if self.kept else []),
        ]

    @classmethod
    def from_json(cls, data: Any) -> TensorSpec:
        """Inverse of ``to_json``. ``data`` comes from another rank: raises ValueError if it is not a spec."""
        match data:
            case [[*shape], str(name), bool(requires_grad), [*order], shard, *kept] if all(
                type(size) is int and size >= 0 for size in shape
            ) and (not kept or (len(kept) == 1 and kept[0] is True)):
                dtype = getattr(torch, name, None)
                dims = range(len(shape))
                ordered = not order or sorted(order) == list(dims)
                split = shard is None or (type(shard) is int and shard in dims and not order)
                if isinstance(dtype, torch.dtype) and ordered and split:
                    return cls(tuple(shape), dtype, requires_grad, tuple(order), shard, kept=bool(kept))
        raise ValueError(f'expected a tensor spec such as [[4, 8], "float32", true, [], null], got {data!r}')

    def __str__(self) -> str:
        if is_mark(self):
            return "None" if self.shape[2:] == (1, 0) else "a name"
        grad = " with grad" if self.requires_grad else ""
        split = "" if self.shard is None else f" split over the ranks in dimension {self.shard}"
        kept = " kept on its node" if self.kept else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{split}{grad}{kept}"


def _order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.is_contiguous():
        return ()
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


def is_mark(tensor: torch.Tensor | TensorSpec) -> bool:
    """Whether a tensor stands for None or a name: see ``ldt.runtime.common.output_marks``."""
    return tensor.dtype is MARK_DTYPE and len(tensor.shape) == 4 and tensor.shape[0] == tensor.shape[1] == 0


HopSpecs = tuple[TensorSpec, ...]


def specs_of(tensors: Sequence[torch.Tensor]) -> HopSpecs:
    """The spec of each tensor."""
    return tuple(TensorSpec.of(tensor) for tensor in tensors)


def backward_specs(specs: Sequence[TensorSpec]) -> HopSpecs:
    """The specs of the backward message for a hop of ``specs``: the gradients, and flags for the uncertain ones.

    The last tensor holds one byte for each tensor whose ``used`` is None: 1 if it has a gradient, 0 if zeros are sent.
    """
    grads = tuple(spec for spec in specs if spec.requires_grad and spec.used is not False)
    uncertain = sum(spec.used is None for spec in grads)
    return (*grads, TensorSpec((uncertain,), torch.uint8)) if uncertain else grads


def describe(specs: Sequence[TensorSpec]) -> str:
    """``float32[4, 8] with grad, int64[3]``; ``nothing`` for an empty hop."""
    return ", ".join(map(str, specs)) or "nothing"


_CAUSES = (
    "autocast and train/eval mode must be the same on all ranks; if a layer changed since the last step, call "
    "pipeline.forget_shapes() on every rank; if hooks or state change the output, declare it in the module's method "
    "output_spec"
)
_DECLARED = (
    "its output_spec must match what its forward returns, also under autocast and in train and eval mode; if a layer "
    "changed since the last step, call pipeline.forget_shapes() on every rank"
)


def first_difference(
    expected: Sequence[TensorSpec], got: Sequence[TensorSpec], declared: bool = False
) -> str | None:
    """How ``got`` differs from the agreed specs, as the second half of an error text; None if it does not.

    ``declared`` says that ``expected`` comes from an ``output_spec``.
    A tensor that was agreed with a gradient and has none is no difference: its gradient is received and dropped. It is
    one if the tensor is ``decisive``: the reentrant checkpoint would train its layers all the same.
    """
    causes = _DECLARED if declared else _CAUSES
    if len(expected) != len(got):
        agreed = f"{len(expected)} tensors were agreed ({describe(expected)})"
        return f"{agreed}, got {len(got)} ({describe(got)}); {causes}"
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        if (want.shape, want.dtype, want.shard, want.kept) != (have.shape, have.dtype, have.shard, have.kept):
            return f"tensor {index} was agreed as {want}, got {have}; {causes}"
        if want.decisive and not have.requires_grad:
            return (
                f"tensor {index} requires no gradient, but was agreed as {want}: a checkpoint with use_reentrant=True "
                "on a later stage would train its layers, which the unsplit model does not. Let the tensor always "
                "require a gradient, or use use_reentrant=False there"
            )
        if have.requires_grad and not want.requires_grad and declared:
            return (
                f"tensor {index} requires a gradient, but the output_spec of the chunk says {want}: return "
                "TensorSpec(..., requires_grad=True) there; eval ignores it"
            )
        if have.requires_grad and not want.requires_grad:
            return (
                f"tensor {index} requires a gradient, but was agreed as {want}; if layers were unfrozen since the last "
                "step, call pipeline.forget_shapes() on every rank; if it depends on the chunk's state, give the "
                "module a method output_spec"
            )
    return None
