"""What a hop carries, in figures: shape, dtype and whether a gradient comes back. Never values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = ["HopSpecs", "TensorSpec", "backward_specs", "describe", "first_difference", "specs_of"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a hop. ``requires_grad`` means that it may require a gradient, which the receiver then sends back.

    ``order`` is its layout in memory: the dimensions from the outermost to the innermost, empty for the usual order.
    It travels in that order, and arrives in it, gradients too: kernels may sum in the order of memory. A tensor whose
    elements do not fill its memory (a slice, an expanded tensor) has the usual order and arrives contiguous.
    ``shard`` is the dimension that is split over the ranks of each stage (see ``ldt.runtime.comm.shards``), None where
    each has all; ``shape`` is that of the whole.
    ``used`` says whether the next chunk uses it where gradients are concerned: False if it does not, and sends none
    back, None if that shows in each microbatch. ``decisive`` says that a reentrant checkpoint behind the hop trains its
    layers only if this tensor requires a gradient. Both are found by all ranks alike and not told.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    order: tuple[int, ...] = ()
    shard: int | None = None
    used: bool | None = True
    decisive: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of ``tensor`` as it is."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, _order_of(tensor))

    def without_grad(self) -> TensorSpec:
        """The same tensor in a forward-only step."""
        return replace(self, requires_grad=False)

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    # -- on the wire -----------------------------------------------------------------------------------------

    @property
    def wire_shape(self) -> tuple[int, ...]:
        """The shape in the order of memory."""
        return tuple(self.shape[dim] for dim in self.order) if self.order else self.shape

    def to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of ``tensor`` that is contiguous if its layout is the agreed one."""
        return tensor.permute(self.order) if self.order else tensor

    def from_wire(self, received: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view of what was received in ``wire_shape``."""
        if not self.order:
            return received
        return received.permute([self.order.index(dim) for dim in range(len(self.order))])

    # -- as text ---------------------------------------------------------------------------------------------

    def to_json(self) -> list[Any]:
        """``[[4, 8], "float32", true, [], null]``."""
        return [
            list(self.shape),
            str(self.dtype).removeprefix("torch."),
            self.requires_grad,
            list(self.order),
            self.shard,
        ]

    @classmethod
    def from_json(cls, data: Any) -> TensorSpec:
        """Read what ``to_json`` gives. It comes from another rank: raises ValueError if it is not a spec."""
        match data:
            case [[*shape], str(name), bool(requires_grad), [*order], shard] if all(
                type(size) is int and size >= 0 for size in shape
            ):
                dtype = getattr(torch, name, None)
                dims = range(len(shape))
                ordered = not order or sorted(order) == list(dims)
                split = shard is None or (type(shard) is int and shard in dims and not order)
                if isinstance(dtype, torch.dtype) and ordered and split:
                    return cls(tuple(shape), dtype, requires_grad, tuple(order), shard)
        raise ValueError(f'expected a tensor spec such as [[4, 8], "float32", true, [], null], got {data!r}')

    def __str__(self) -> str:
        grad = " with grad" if self.requires_grad else ""
        split = "" if self.shard is None else f" split over the ranks in dimension {self.shard}"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{split}{grad}"


def _order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.is_contiguous():
        return ()
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


HopSpecs = tuple[TensorSpec, ...]


def specs_of(tensors: Sequence[torch.Tensor]) -> HopSpecs:
    """The spec of each tensor."""
    return tuple(TensorSpec.of(tensor) for tensor in tensors)


def backward_specs(specs: Sequence[TensorSpec]) -> HopSpecs:
    """What a message backward holds for a hop of ``specs``: gradients, and which of those in doubt there really are.

    The latter as one byte each, 1 or 0, in a last tensor; a gradient that there is not is sent as zeros then.
    """
    grads = tuple(spec for spec in specs if spec.requires_grad and spec.used is not False)
    in_doubt = sum(spec.used is None for spec in grads)
    return (*grads, TensorSpec((in_doubt,), torch.uint8)) if in_doubt else grads


def describe(specs: Sequence[TensorSpec]) -> str:
    """``float32[4, 8] with grad, int64[3]``; ``nothing`` for an empty hop."""
    return ", ".join(map(str, specs)) or "nothing"


_CAUSES = (
    "autocast and the mode of modules (train or eval) must be the same on all ranks, and if a layer was changed since "
    "the last step, call pipeline.forget_shapes() on every rank; what hooks make of it, or a state, is to be declared: "
    "give the module a method output_spec"
)
_DECLARED = (
    "its output_spec must say what its forward returns, also under autocast and in train and eval mode; if a layer was "
    "changed since the last step, call pipeline.forget_shapes() on every rank"
)


def first_difference(
    expected: Sequence[TensorSpec], got: Sequence[TensorSpec], declared: bool = False
) -> str | None:
    """Where ``got`` is not what was agreed, as the second half of an error text; None if it is.

    ``declared`` says that an ``output_spec`` has told what to expect.
    A tensor that was announced with a gradient and has none is no difference: its gradient comes and is dropped. It is
    one where a reentrant checkpoint would train its layers, as it cannot know.
    """
    causes = _DECLARED if declared else _CAUSES
    if len(expected) != len(got):
        agreed = f"{len(expected)} tensors were agreed ({describe(expected)})"
        return f"{agreed}, it has {len(got)} ({describe(got)}); {causes}"
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        if (want.shape, want.dtype, want.shard) != (have.shape, have.dtype, have.shard):
            return f"tensor {index} was agreed as {want}, it is {have}; {causes}"
        if want.decisive and not have.requires_grad:
            return (
                f"tensor {index} requires no gradient, but was agreed as {want}, for which a checkpoint "
                "with use_reentrant=True on a later stage would train its layers; in the unsplit model it does "
                "not. Let the tensor always require a gradient, or use use_reentrant=False there"
            )
        if have.requires_grad and not want.requires_grad and declared:
            return (
                f"tensor {index} requires a gradient, but the output_spec of the chunk says {want}: let it return "
                "TensorSpec(..., requires_grad=True) there, which evals do not mind"
            )
        if have.requires_grad and not want.requires_grad:
            return (
                f"tensor {index} requires a gradient, but was agreed as {want}; if layers were unfrozen since "
                "the last step, call pipeline.forget_shapes() on every rank; if it depends on the state of the chunk, "
                "give the module a method output_spec"
            )
    return None
