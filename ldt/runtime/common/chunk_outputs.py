"""What a chunk may return: a tensor or a tuple of tensors, each with memory of its own to send; the last, anything."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ldt.runtime.common.redact import InputTypeError, InputValueError

__all__ = ["as_tensors", "check_device", "check_sendable", "merge_tensors", "split_tensors"]


def as_tensors(output: Any, chunk: int) -> tuple[torch.Tensor, ...]:
    """A chunk's output as a tuple. Raises TypeError if it is not a tensor or a tuple of tensors."""
    if isinstance(output, torch.Tensor):
        return (output,)
    if isinstance(output, (tuple, list)) and all(isinstance(tensor, torch.Tensor) for tensor in output):
        return tuple(output)
    kind = type(output).__name__
    if isinstance(output, (tuple, list)):
        kinds = ["Tensor" if isinstance(entry, torch.Tensor) else type(entry).__name__ for entry in output]
        kind += f" of {', '.join(kinds)}"
    raise InputTypeError(f"chunk {chunk} must return a tensor or a tuple of tensors, got {kind}")


def check_device(tensors: Sequence[torch.Tensor], device: torch.device, what: str) -> None:
    """Raise ValueError if one of ``tensors``, which are to be sent, is not on ``device``, the mesh's."""
    for index, tensor in enumerate(tensors):
        if tensor.device != device:
            raise InputValueError(
                f"{what}, tensor {index} is on {tensor.device}, but the mesh is on {device}: return it there, with the "
                "module and what it computes on moved by .to(mesh.device)"
            )


class _Place(NamedTuple):
    """Where a tensor was."""

    number: int


def split_tensors(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """The tensors of ``output``, detached, and what remains of it, to be ``merge_tensors`` with them again.

    Looks into what pytree knows and into dataclasses; objects of other classes remain as they are.
    """
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> _Place:
        tensors.append(tensor.detach())
        return _Place(len(tensors) - 1)

    return _mapped(torch.Tensor, take, output), tensors


def merge_tensors(rest: Any, tensors: list[torch.Tensor]) -> Any:
    """``rest`` with ``tensors`` at their places."""
    return _mapped(_Place, lambda place: tensors[place.number], rest)


def _mapped(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            return function(leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        same = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            if hasattr(leaf, field.name):  # also of a frozen one
                object.__setattr__(same, field.name, _mapped(kind, function, getattr(leaf, field.name)))
        return same

    return pytree.tree_map(replaced, value, is_leaf=lambda part: isinstance(part, kind))


def check_sendable(tensor: torch.Tensor, what: str) -> None:
    """Raise TypeError if ``tensor``, which is to be sent, has no memory of plain elements: a lane sends just that."""
    way_out = _way_out(tensor)
    if way_out is not None:
        kind = "quantized" if tensor.is_quantized else f"{tensor.layout}, {tensor.device.type}"
        raise InputTypeError(
            f"{what} is a tensor ({kind}) without plain memory to send to another node: {way_out} in the chunk"
        )
    if is_traceable_wrapper_subclass(tensor):
        kind, advice = (
            type(tensor).__name__,
            "make it a plain tensor, the result of an asynchronous collective * 1.0",
        )
        if isinstance(tensor, DTensor):
            kind = f"DTensor of {tensor.placements} over {tensor.device_mesh}"
            advice = (
                "make it one that is Shard over mesh.tp_mesh alone, or plain with full_tensor() or to_local()"
            )
        raise InputTypeError(f"{what} is a {kind}, which cannot be sent to another node: {advice}")


def _way_out(tensor: torch.Tensor) -> str | None:
    """What makes a plain tensor of one that is not; None for one that is, or that wraps others."""
    if tensor.is_quantized:
        return "call dequantize(), or return its int_repr()"
    if tensor.is_nested:
        return "call to_padded_tensor(), or return values() and offsets()"
    if tensor.layout is not torch.strided:
        return "call to_dense(), or give the layer that makes it sparse=False,"
    if tensor.is_meta and not isinstance(tensor, FakeTensor):
        return (
            "give its modules memory with to_empty(device=mesh.device), load their weights and compute on it"
        )
    return None
