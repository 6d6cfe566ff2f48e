"""What leaves a chunk has memory of its own, so that nothing that runs later writes to it before it has gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import torch

from ldt._C import VersionCounters, is_memory_own
from ldt.errors import LdtError
from ldt.runtime.execution.stash import Slot
from ldt.runtime.model.module_state import repeats_elements, unwrapped_tensors

__all__ = ["InFlightTensors", "overlapping", "own_memory"]

_use_count: Any = getattr(torch._C, "_storage_Use_Count", lambda _: 1 << 30)  # without it, all is copied


def own_memory(tensors: list[Any], always: Container[int] = ()) -> list[int]:
    """Give each tensor of the list memory to which nothing outside of the list refers, by a copy if need be.

    Who refers to it may write to it while the tensor is on its way: a parameter to whose ``grad`` autograd gave it, a
    module or a hook that keeps it. Copied are also those at the places ``always``, and memory that torch has not
    allocated, of which others may know the address. None stays None. Returns the places of tensors to whose memory
    something else refers, be it another tensor of the list.

    The tensors must be fresh from ``detach``: who holds a tensor itself is not seen. Nothing here waits for a device.
    """
    return _copy_held(tensors, always) if always or not is_memory_own(tensors) else []


def overlapping(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The places of tensors of which several elements are one number in memory, as of those from ``expand``."""
    return [place for place, tensor in enumerate(tensors) if _overlaps(tensor)]


class InFlightTensors:
    """What a rank has given away in a step, and how often each tensor had been written to by then."""

    def __init__(self) -> None:
        self._versions: dict[Slot, VersionCounters] = {}

    def begin(self, slot: Slot, tensors: Sequence[Any]) -> None:
        """``tensors``, where None is none, are on their way to ``slot``."""
        self._versions[slot] = VersionCounters(tensors)

    def end(self, slot: Slot) -> None:
        """They are there. Raises LdtError if one was changed before this was known."""
        versions = self._versions.pop(slot, None)
        changed = None if versions is None else versions.first_changed()
        if changed is not None:
            raise LdtError(_changed(slot, changed))

    def clear(self) -> None:
        self._versions.clear()


def _changed(slot: Slot, place: int) -> str:
    forward = slot.direction == "F"
    source, what = (slot.chunk - 1, "output") if forward else (slot.chunk + 1, "gradient of input")
    return (
        f"chunk {source}, microbatch {slot.microbatch}: {what} {place} was changed in place while it was under way "
        f"(message {slot.direction}{min(source, slot.chunk)}), so chunk {slot.chunk} may have got other values than "
        "were computed. Let what keeps and changes it, the module or a hook, keep a clone() instead"
    )


def _copy_held(tensors: list[Any], always: Container[int]) -> list[int]:
    memory = [() if tensor is None else _memory(tensor) for tensor in tensors]
    shared = [place for place, own in enumerate(memory) if any(_holders(storage) > 1 for storage in own)]
    mine = Counter(storage._cdata for place in shared for storage in memory[place])
    held = [any(_holders(storage) > max(1, mine[storage._cdata]) for storage in own) for own in memory]
    for place, own in enumerate(memory):  # only now, as each copy leaves one holder less
        if held[place] or place in always or not all(storage.resizable() for storage in own):
            tensors[place] = tensors[place].clone()
    return shared


def _overlaps(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    if tensor.is_nested:
        return False
    return repeats_elements(tensor)


def _memory(tensor: Any) -> tuple[torch.UntypedStorage, ...]:
    """Of the tensor, or of those that it wraps; nothing of one that is sparse or nested."""
    parts = unwrapped_tensors(tensor)
    return tuple(part.untyped_storage() for part in parts if part.layout is torch.strided)


def _holders(storage: torch.UntypedStorage) -> int:
    """How many tensors refer to it: all who do, but for ``storage`` itself."""
    count: int = _use_count(storage._cdata)
    return count - 1
