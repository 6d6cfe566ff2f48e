"""Finds the first NaN or infinity in outputs, losses and gradients of chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ldt._torch_private import pytree
from ldt.errors import NonFiniteError

__all__ = ["NanCheck"]

_Named = tuple[str, torch.Tensor]


class NanCheck:
    """Raises NonFiniteError for the first tensor of an action with a NaN or an infinity, before it is sent.

    Checks ``activations`` (outputs of chunks, and the loss), ``gradients``, both or neither. -inf passes in outputs,
    since attention masks and masked logits contain it on purpose. Each call waits for the device once. Of a DTensor
    only this rank's part is checked. Gradients that ``fully_shard`` has not reduced yet are not checked.
    """

    def __init__(self, *, activations: bool = False, gradients: bool = False) -> None:
        self._activations = activations
        self._gradients = gradients

    def outputs(self, chunk: int, microbatch: int, output: Any) -> None:
        """Check all tensors that the module returned from a forward."""
        if self._activations:
            leaves = enumerate(pytree.tree_leaves(output))
            named = ((f"output {i}", leaf) for i, leaf in leaves if isinstance(leaf, torch.Tensor))
            _check(chunk, microbatch, named, _is_below_infinity)

    def loss(self, chunk: int, microbatch: int, loss: torch.Tensor) -> None:
        """Check what the loss function returned for the output of ``chunk``, the last one."""
        if self._activations:
            _check(chunk, microbatch, [("the loss", loss)], _is_finite)

    def auxiliary(self, chunk: int, microbatch: int, name: str, loss: torch.Tensor) -> None:
        """Check an auxiliary loss as it leaves ``chunk``."""
        if self._activations:
            _check(chunk, microbatch, [(f"the auxiliary loss {name!r}", loss)], _is_finite)

    def gradients(
        self,
        chunk: int,
        microbatch: int,
        inputs: Sequence[torch.Tensor | None] = (),
        parameters: Iterable[tuple[str, torch.nn.Parameter]] = (),
    ) -> None:
        """Check the gradients of ``inputs`` (None if absent) and of ``parameters`` after a backward."""
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
    """The largest magnitude is NaN or infinite if any element is. Needs no temporary of the tensor's size."""
    return torch.isfinite(torch.linalg.vector_norm(part, math.inf))


def _is_below_infinity(part: torch.Tensor) -> torch.Tensor:
    """The largest number is NaN if any element is."""
    return _real(part).amax() < math.inf


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of ``tensor``, in a dtype that supports norms."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def _real(part: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(part.resolve_conj()) if part.is_complex() else part


def _counts(part: torch.Tensor) -> str:
    """Describe how many of its values are not finite. A complex element counts as two values."""
    real = _real(part)
    masks = {"NaN": real.isnan(), "+inf": real.isposinf(), "-inf": real.isneginf()}
    found = {kind: int(mask.sum()) for kind, mask in masks.items()}
    return (
        f"{', '.join(f'{count} {kind}' for kind, count in found.items() if count)} of {real.numel()} values"
    )
