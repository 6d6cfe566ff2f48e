"""What leaves a chunk has memory of its own, so that nothing that runs later writes to it before it has gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ldt.errors import LdtError
from ldt.runtime.mailbox import Slot

__all__ = ["Departures", "own_memory"]

_use_count: Any = getattr(torch._C, "_storage_Use_Count", lambda _: 1 << 30)  # without it, all is copied


def own_memory(tensors: list[Any], always: Container[int] = ()) -> list[int]:
    """Give each tensor of the list memory to which nothing outside of the list refers, by a copy if need be.

    Who refers to it may write to it while the tensor is on its way: a parameter to whose ``grad`` autograd gave it, a
    module or a hook that keeps it. Copied are also those at the places ``always``, and memory that torch has not
    allocated, of which others may know the address. None stays None. Returns the places of tensors to whose memory
    something else refers, be it another tensor of the list.

    The tensors must be fresh from ``detach``: who holds a tensor itself is not seen. Nothing here waits for a device.
    """
    doubtful = [place for place, tensor in enumerate(tensors) if tensor is not None and not _is_alone(tensor)]
    return _copy_held(tensors, always) if doubtful or always else doubtful


class Departures:
    """What a rank has given away in a step, and how often each tensor had been written to by then, which torch counts.

    Holds counters and no memory. What writes by ``.data``, or in kernels that torch does not know, is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._noted: dict[
            Slot, list[tuple[torch.Tensor, int, int]]
        ] = {}  # a counter, its value, and the place
        self._nothing = torch.empty(0, device=device)

    def begin(self, slot: Slot, tensors: Sequence[Any]) -> None:
        """``tensors``, where None is none, are on their way to ``slot``."""
        noted = self._noted[slot] = []
        for place, tensor in enumerate(tensors):
            if tensor is not None:
                try:
                    counter = tensor.detach()
                    counter.data = self._nothing  # it goes on counting
                    noted.append((counter, counter._version, place))
                except (
                    RuntimeError
                ):  # has no counter, or no memory of this device: never crosses, or from inference
                    continue

    def end(self, slot: Slot) -> None:
        """They are there. Raises LdtError if one was changed before this was known."""
        for counter, version, place in self._noted.pop(slot, ()):
            if counter._version != version:
                raise LdtError(_changed(slot, place))

    def clear(self) -> None:
        self._noted.clear()


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
    for place, own in enumerate(memory):
        held = any(_holders(storage) > max(1, mine[storage._cdata]) for storage in own)
        if held or place in always or not all(storage.resizable() for storage in own):
            tensors[place] = tensors[place].clone()
    return shared


def _is_alone(tensor: Any) -> bool:
    """Whether torch has allocated its memory, for nobody else. False of what has none, or wraps others."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    return _use_count(storage._cdata) == 2 and storage.resizable()  # the tensor, and ``storage``


def _memory(tensor: Any) -> tuple[torch.UntypedStorage, ...]:
    """Of the tensor, or of those that it wraps; nothing of one that is sparse or nested."""
    if type(tensor) is torch.Tensor:
        return (tensor.untyped_storage(),) if tensor.layout is torch.strided else ()
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = (getattr(tensor, name) for name in names)
        return tuple(storage for part in inner if isinstance(part, torch.Tensor) for storage in _memory(part))
    return (tensor.untyped_storage(),)


def _holders(storage: torch.UntypedStorage) -> int:
    """How many tensors refer to it: all who do, but for ``storage`` itself."""
    count: int = _use_count(storage._cdata)
    return count - 1
