"""Checks what a chunk returns, and splits the tensors from the last chunk's output.

A chunk returns tensors with plain memory to send, in a tuple or by name; the last chunk may return anything.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ldt._torch_private import FakeTensor, is_traceable_wrapper_subclass, pytree
from ldt.runtime.common.kept import Kept
from ldt.runtime.common.output_marks import encode_names, encode_none
from ldt.runtime.common.redact import InputTypeError, InputValueError
from ldt.runtime.common.tensor_spec import is_mark

__all__ = [
    "Outputs",
    "as_tensors",
    "check_device",
    "check_sendable",
    "entries_of",
    "has_kept",
    "merge_tensors",
    "split_tensors",
]


class Outputs(tuple[torch.Tensor, ...]):
    """The outputs of a chunk: those for the next chunk, then ``num_kept`` for the next chunk of its node."""

    num_kept = 0

    def with_last_sent(self, tensors: Sequence[torch.Tensor]) -> Outputs:
        """These outputs with ``tensors`` behind those for the next chunk."""
        sent = len(self) - self.num_kept
        found = Outputs((*self[:sent], *tensors, *self[sent:]))
        found.num_kept = self.num_kept
        return found


def entries_of(output: Any) -> Sequence[Any]:
    """The entries of what a chunk returned, in the order in which they are sent.

    Those of a tuple, with a tensor that stands for each None; of a dict or a ModelOutput its tensors, and others that
    stand for their names; or the one thing that it returned.
    """
    if isinstance(output, Kept):
        return (output,)
    named = isinstance(output, Mapping) and all(isinstance(name, str) and name for name in output)
    entries = list(output.values()) if named else output
    if not isinstance(entries, (tuple, list)):
        return (output,)
    device = next((entry.device for entry in entries if isinstance(entry, torch.Tensor)), None)
    if device is None:
        return entries if not named else (output,)
    entries = [encode_none(device) if entry is None else entry for entry in entries]
    return list(encode_names(dict(zip(output, entries, strict=True)), device)) if named else entries


def as_tensors(output: Any, chunk: int) -> Outputs:
    """A chunk's output as a tuple. Raises TypeError if it has anything but tensors and None, or no tensor."""
    for entry in output.values() if isinstance(output, Mapping) else pytree.tree_leaves(output):
        if isinstance(entry, torch.Tensor) and is_mark(entry):
            raise InputValueError(
                f"chunk {chunk} returns an empty tensor of uint8 and shape {list(entry.shape)}, which stands for None "
                "or a name between chunks: give it another shape"
            )
    entries = entries_of(output)
    kept = [entry.tensor for entry in entries if isinstance(entry, Kept)]
    tensors = [entry for entry in entries if not isinstance(entry, Kept)] + kept
    if all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        found = Outputs(tensors)
        found.num_kept = len(kept)
        return found
    kind = type(output).__name__
    if isinstance(output, (tuple, list, Mapping)):
        values = output.values() if isinstance(output, Mapping) else output
        kinds = ["Tensor" if isinstance(entry, torch.Tensor) else type(entry).__name__ for entry in values]
        kind += f" of {', '.join(kinds)}"
    raise InputTypeError(
        f"chunk {chunk} must return a tensor, or a tuple or a dict of tensors and None, got {kind}"
    )


def check_device(tensors: Sequence[torch.Tensor], device: torch.device, what: str) -> None:
    """Raise ValueError if one of ``tensors``, which are about to be sent, is not on ``device``, the mesh's device."""
    for index, tensor in enumerate(tensors):
        if tensor.device != device:
            raise InputValueError(
                f"{what}, tensor {index} is on {tensor.device}, but the mesh is on {device}: return it there. Move "
                "the module, its inputs and what its forward creates with .to(mesh.device)"
            )


def has_kept(output: Any) -> bool:
    """Whether anything in ``output`` is kept."""
    leaves = pytree.tree_leaves(output, is_leaf=lambda part: isinstance(part, Kept))
    return any(isinstance(leaf, Kept) for leaf in leaves)


class _Slot(NamedTuple):
    """Stands for tensor ``number`` in an output whose tensors were split off."""

    number: int


def split_tensors(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """Split ``output`` into the rest and its tensors, detached. ``merge_tensors`` puts them together again.

    Looks into pytrees and dataclasses. Objects of other classes stay as they are.
    """
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> _Slot:
        tensors.append(tensor.detach())
        return _Slot(len(tensors) - 1)

    return _mapped(torch.Tensor, take, output), tensors


def merge_tensors(rest: Any, tensors: list[torch.Tensor]) -> Any:
    """``rest`` with ``tensors`` in their slots."""
    return _mapped(_Slot, lambda slot: tensors[slot.number], rest)


def _mapped(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            return function(leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        same = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            if hasattr(leaf, field.name):  # bypasses the __setattr__ of frozen dataclasses
                object.__setattr__(same, field.name, _mapped(kind, function, getattr(leaf, field.name)))
        return same

    return pytree.tree_map(replaced, value, is_leaf=lambda part: isinstance(part, kind))


def check_sendable(tensor: torch.Tensor, what: str) -> None:
    """Raise TypeError if ``tensor`` has no plain memory. A lane sends nothing else."""
    conversion = _conversion(tensor)
    if conversion is not None:
        kind = "quantized" if tensor.is_quantized else f"{tensor.layout}, {tensor.device.type}"
        raise InputTypeError(
            f"{what} is a tensor ({kind}) without plain memory to send to another node: {conversion} in the chunk"
        )
    if is_traceable_wrapper_subclass(tensor):
        kind, advice = (
            type(tensor).__name__,
            "make it a plain tensor, the result of an asynchronous collective * 1.0",
        )
        if isinstance(tensor, DTensor):
            kind = f"DTensor of {tensor.placements} over {tensor.device_mesh}"
            advice = (
                "redistribute it to Shard over mesh.tp_mesh alone, or make it plain with full_tensor() or "
                "to_local()"
            )
        raise InputTypeError(f"{what} is a {kind}, which cannot be sent to another node: {advice}")


def _conversion(tensor: torch.Tensor) -> str | None:
    """How to turn ``tensor`` into a plain one; None if it is plain or a wrapper of other tensors."""
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
