"""What leaves the edge: refused where it is a sample, a label or a loss, and written down if asked."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ldt._torch_private import pytree
from ldt.runtime.common.redact import InputValueError, QuotingError
from ldt.runtime.model.module_state import unwrapped_tensors
from ldt.runtime.step.microbatch import Microbatch

__all__ = ["Audit", "Guard"]


class Audit:
    """Writes a line of JSON for all that a rank of the edge sends in its calls, to ``path``, which must be new.

    Of an "activation" or a "gradient": the call's number, channel, microbatch and tensor, its shape, dtype and bytes as
    this rank has them. Of "metadata" and "tokens", which go to each other node: the call and the bytes. Raises OSError,
    and LdtError if the file is there.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._file = Path(path).open("x", encoding="utf-8")  # noqa: SIM115 (as long as the pipeline lives)
        except FileExistsError:
            text = "the file of an audit exists already, and is never written over: name a new one"
            raise QuotingError(f"{text}, got {path}", plain=text) from None

    def discard(self) -> None:
        """Remove the file: there is nothing to tell."""
        self._file.close()
        Path(self._file.name).unlink()

    def write(self, purpose: str, call: int, nbytes: int, **details: Any) -> None:
        """A line about ``nbytes`` that leave in the call of number ``call``."""
        self._file.write(json.dumps({"call": call, "purpose": purpose, "bytes": nbytes, **details}) + "\n")
        self._file.flush()

    def write_tensors(
        self, purpose: str, call: int, channel: str, microbatch: int, tensors: Sequence[torch.Tensor]
    ) -> None:
        """A line about each tensor of a message."""
        for index, tensor in enumerate(tensors):
            self.write(
                purpose,
                call,
                tensor.numel() * tensor.element_size(),
                channel=channel,
                microbatch=microbatch,
                tensor=index,
                shape=list(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
            )


class Guard:
    """Knows the memory that may not leave: that of samples and labels, and of losses as they come, of two steps.

    Found is whatever overlaps it: tensors, arrays that NumPy can see, in lists, dicts and other mappings. With
    ``copies`` also tensors of equal contents, which costs comparisons and, on a device, waits for it. Parts of copies
    are not found.
    """

    def __init__(
        self, microbatches: Iterable[Microbatch], copies: bool = False, earlier: Guard | None = None
    ) -> None:
        self._kept: list[_Kept] = []
        self._losses: list[_Kept] = []
        for loss in [] if earlier is None else earlier._losses:
            self._kept.append(loss._replace(what="a loss of the step before"))
        for index, microbatch in enumerate(microbatches):
            for where, value in (
                ("inputs", (microbatch.args, microbatch.kwargs)),
                ("target", microbatch.target),
            ):
                self._keep(f"the {where} of microbatch {index}", value)
        self._copies = copies

    def add_loss(self, microbatch: int, loss: torch.Tensor) -> None:
        """Refuse it from now on, in this step and the next; nothing is held, as a loss may have the memory of many."""
        for own in _tensors_in(loss.detach()):
            kept = _Kept.of(f"the loss of microbatch {microbatch}", own, hold=False)
            self._losses.append(kept)
            self._kept.append(kept)

    def end(self) -> None:
        """Let go of the samples: the step is over."""
        self._kept.clear()

    def check(self, tensors: Iterable[torch.Tensor], where: str) -> None:
        """Raise ValueError if one of ``tensors``, which are about to leave over ``where``, may not."""
        for tensor in filter(torch.Tensor.numel, tensors):
            what = self._overlapped(tensor) or (self._copied(tensor) if self._copies else None)
            if what is not None:
                raise InputValueError(
                    f"{where} would send {what} to the cloud: samples, labels and losses stay on the edge. Send what a "
                    "layer made of them"
                )

    def _keep(self, what: str, value: object) -> None:
        for tensor in _tensors_in(value):
            self._kept.append(_Kept.of(what, tensor))

    def _overlapped(self, tensor: torch.Tensor) -> str | None:
        start, stop = _extent(tensor)
        found = (
            kept.what
            for kept in self._kept
            if kept.start < stop and start < kept.stop and kept.device == tensor.device and kept.lives
        )
        return next(found, None)

    def _copied(self, tensor: torch.Tensor) -> str | None:
        """Equally many elements of equal values. Of one or two elements, or of one value, that is chance."""
        values = _values(tensor)
        if values.numel() <= 2 or bool((values == values[0]).all()):
            return None
        for what, own in ((kept.what, kept.tensor) for kept in self._kept if kept.tensor is not None):
            alike = own.numel() == tensor.numel() and own.device == tensor.device
            if alike and torch.equal(_values(own), values):
                return f"a copy of {what}"
        return None


class _Kept(NamedTuple):
    """Memory that may not leave, by its addresses."""

    what: str
    tensor: torch.Tensor | None  # keeps the memory its own
    device: torch.device
    start: int
    stop: int
    memory: weakref.ref[torch.UntypedStorage]

    @classmethod
    def of(cls, what: str, tensor: torch.Tensor, hold: bool = True) -> _Kept:
        memory = weakref.ref(tensor.untyped_storage())
        return cls(what, tensor if hold else None, tensor.device, *_extent(tensor), memory)

    @property
    def lives(self) -> bool:
        """Whether the addresses are still those of this memory: nobody can send what is gone."""
        return self.tensor is not None or self.memory() is not None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from its first element in memory to behind its last."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in a row, in one type for all, so that a copy in another one is equal."""
    return tensor.detach().reshape(-1).to(torch.complex128)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """With memory of their own: of one that wraps others (DTensor), those; of an array, a tensor over its memory."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from unwrapped_tensors(leaf)
        elif isinstance(leaf, Mapping):
            yield from _tensors_in(list(leaf.values()))
        elif hasattr(leaf, "__array_interface__"):
            with contextlib.suppress(TypeError, ValueError):  # of a type that torch has not
                yield torch.as_tensor(leaf, device="cpu")
