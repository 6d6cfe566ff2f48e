"""Looks for NaN and infinities in what chunks compute, and names the first place where there are any."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ldt.errors import NonFiniteError

__all__ = ["NanCheck"]

_Named = tuple[str, torch.Tensor]


class NanCheck:
    """Raises NonFiniteError for the first tensor of an action that has a NaN or an infinity, before it is sent.

    Looks at ``activations`` (outputs of chunks, and the loss), at ``gradients``, or at neither. In an output -inf
    passes, as attention masks and masked logits have it on purpose. Each call waits for the device once. Of a DTensor
    this rank's part is looked at, and no other rank is asked. What ``fully_shard`` has not reduced yet is no
    parameter's gradient.
    """

    def __init__(self, *, activations: bool = False, gradients: bool = False) -> None:
        self._activations = activations
        self._gradients = gradients

    def outputs(self, chunk: int, microbatch: int, output: Any) -> None:
        """After a forward: all tensors of what the module returned."""
        if self._activations:
            leaves = enumerate(pytree.tree_leaves(output))
            named = ((f"output {i}", leaf) for i, leaf in leaves if isinstance(leaf, torch.Tensor))
            _check(chunk, microbatch, named, _is_below_infinity)

    def loss(self, chunk: int, microbatch: int, loss: torch.Tensor) -> None:
        """What the loss function returned for the output of ``chunk``, the last one."""
        if self._activations:
            _check(chunk, microbatch, [("the loss", loss)], _is_finite)

    def gradients(
        self,
        chunk: int,
        microbatch: int,
        inputs: Sequence[torch.Tensor | None] = (),
        parameters: Iterable[tuple[str, torch.nn.Parameter]] = (),
    ) -> None:
        """After a backward: the gradients of inputs, None where there is none, and those that parameters have now."""
        if self._gradients:
            found: list[tuple[str, torch.Tensor | None]] = [
                (f"the gradient of input {i}", grad) for i, grad in enumerate(inputs)
            ]
            found += [(f"the gradient of {name}", parameter.grad) for name, parameter in parameters]
            _check(chunk, microbatch, [(name, grad) for name, grad in found if grad is not None], _is_finite)


@torch.no_grad()
def _check(
    chunk: int, microbatch: int, named: Iterable[_Named], passes: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    parts = [(name, _numbers(tensor)) for name, tensor in named]
    parts = [
        (name, part)
        for name, part in parts
        if part.numel() and (part.is_floating_point() or part.is_complex())
    ]
    if not parts:
        return
    flags = [passes(part) for _, part in parts]
    if bool(torch.stack(flags).all()):
        return
    name, part = next(pair for pair, flag in zip(parts, flags, strict=True) if not flag)
    raise NonFiniteError(
        f"chunk {chunk}, microbatch {microbatch}: {name}, {str(part.dtype).removeprefix('torch.')}"
        f"{list(part.shape)}, has {_counts(part)}",
        chunk=chunk,
        microbatch=microbatch,
    )


def _is_finite(part: torch.Tensor) -> torch.Tensor:
    """The largest magnitude is NaN or infinite if one element is; it needs no memory of the tensor's size."""
    return torch.isfinite(torch.linalg.vector_norm(part, math.inf))


def _is_below_infinity(part: torch.Tensor) -> torch.Tensor:
    """Likewise the largest number, which is NaN if one is."""
    return _real(part).amax() < math.inf


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that this rank has of ``tensor``, in a type that has a norm."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def _real(part: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(part.resolve_conj()) if part.is_complex() else part


def _counts(part: torch.Tensor) -> str:
    """How many of its numbers are not finite; a complex element has two."""
    real = _real(part)
    masks = {"NaN": real.isnan(), "+inf": real.isposinf(), "-inf": real.isneginf()}
    found = {kind: int(mask.sum()) for kind, mask in masks.items()}
    return (
        f"{', '.join(f'{count} {kind}' for kind, count in found.items() if count)} of {real.numel()} values"
    )
