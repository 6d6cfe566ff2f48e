"""Protects tensors in flight: each gets memory that nothing else writes to before it is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import torch

from ldt._C import VersionCounters, is_memory_own
from ldt._torch_private import storage_id, storage_use_count
from ldt.errors import LdtError
from ldt.runtime.execution.stash import Slot
from ldt.runtime.model.module_state import repeats_elements, unwrapped_tensors

__all__ = ["InFlightTensors", "own_memory", "self_overlapping"]


def own_memory(tensors: list[Any], always: Container[int] = ()) -> list[int]:
    """Give each tensor of the list memory that nothing outside the list refers to, by a copy where necessary.

    Anything else that refers to the memory may write to it while the tensor is in flight: a parameter whose ``grad``
    it became, or a module or hook that keeps it. Tensors at the indices ``always`` are copied too, and so is memory
    that torch did not allocate, since others may know its address. None stays None.

    The tensors must be fresh from ``detach``, because references to a tensor itself are not seen. Does not wait for a
    device.

    Returns:
        The indices of tensors whose memory something else refers to, including another tensor of the list.
    """
    return _copy_held(tensors, always) if always or not is_memory_own(tensors) else []


def self_overlapping(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The indices of tensors with several elements at one address, as those from ``expand``."""
    return [index for index, tensor in enumerate(tensors) if _overlaps_itself(tensor)]


class InFlightTensors:
    """The tensors of a step that are in flight, with the version of each when it was handed over."""

    def __init__(self) -> None:
        self._versions: dict[Slot, VersionCounters] = {}

    def begin(self, slot: Slot, tensors: Sequence[Any]) -> None:
        """``tensors``, which may include None, are in flight to ``slot`` from now on."""
        self._versions[slot] = VersionCounters(tensors)

    def end(self, slot: Slot) -> None:
        """They have arrived. Raises LdtError if one was changed meanwhile."""
        versions = self._versions.pop(slot, None)
        changed = None if versions is None else versions.first_changed()
        if changed is not None:
            raise LdtError(_changed(slot, changed))

    def clear(self) -> None:
        self._versions.clear()


def _changed(slot: Slot, index: int) -> str:
    forward = slot.direction == "F"
    source, what = (slot.chunk - 1, "output") if forward else (slot.chunk + 1, "gradient of input")
    return (
        f"chunk {source}, microbatch {slot.microbatch}: {what} {index} was changed in place while it was in flight "
        f"(message {slot.direction}{min(source, slot.chunk)}), so chunk {slot.chunk} may have received wrong values. "
        "The module or hook that keeps and changes it must keep a clone() instead"
    )


def _copy_held(tensors: list[Any], always: Container[int]) -> list[int]:
    memory = [() if tensor is None else _memory(tensor) for tensor in tensors]
    shared = [index for index, storages in enumerate(memory) if any(_users(s) > 1 for s in storages)]
    in_list = Counter(storage_id(storage) for index in shared for storage in memory[index])
    held = [any(_users(s) > max(1, in_list[storage_id(s)]) for s in storages) for storages in memory]
    for index, storages in enumerate(memory):  # last, since each copy removes a user
        if held[index] or index in always or not all(storage.resizable() for storage in storages):
            tensors[index] = tensors[index].clone()
    return shared


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    if tensor.is_nested:
        return False
    return repeats_elements(tensor)


def _memory(tensor: Any) -> tuple[torch.UntypedStorage, ...]:
    """The storages of the tensor or of those that it wraps. Empty for sparse and nested tensors."""
    parts = unwrapped_tensors(tensor)
    return tuple(part.untyped_storage() for part in parts if part.layout is torch.strided)


def _users(storage: torch.UntypedStorage) -> int:
    """The number of tensors that refer to it; ``storage`` itself does not count."""
    count = storage_use_count(storage)
    return count - 1
