"""Refuses to send samples, labels or losses to the cloud, and logs everything that leaves the edge on request."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ldt._torch_private import pytree
from ldt.runtime.comm.compression import Scheme, packs, wire_bytes
from ldt.runtime.common.redact import InputValueError, QuotingError
from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.runtime.model.module_state import unwrapped_tensors
from ldt.runtime.step.microbatch import Microbatch
from ldt.topology import Channel

__all__ = ["Audit", "Guard"]


class Audit:
    """Writes a line of JSON to ``path`` for everything that a rank of the edge sends in its calls.

    For an "activation" or a "gradient", a line has the call's number, channel, microbatch and tensor, with the shape,
    dtype and bytes of this rank's tensor. A tensor that crosses packed also has "compression", and its bytes are those
    on the wire. For "metadata", "tokens" and
    a "command" of ``ldt.Leader``, which go to each other node, it has the call and the bytes. Raises
    OSError, and LdtError if the file exists.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._file = Path(path).open("x", encoding="utf-8")  # noqa: SIM115 (open as long as the pipeline lives)
        except FileExistsError:
            text = "the audit file exists and is never overwritten: choose a new path"
            raise QuotingError(f"{text}, got {path}", plain=text) from None

    def discard(self) -> None:
        """Close and delete the file."""
        self._file.close()
        Path(self._file.name).unlink()

    def write(self, purpose: str, call: int, nbytes: int, **details: Any) -> None:
        """Write a line about ``nbytes`` sent in call number ``call``."""
        self._file.write(json.dumps({"call": call, "purpose": purpose, "bytes": nbytes, **details}) + "\n")
        self._file.flush()

    def write_tensors(
        self,
        call: int,
        channel: Channel,
        microbatch: int,
        tensors: Sequence[torch.Tensor],
        specs: Sequence[TensorSpec],
        scheme: Scheme,
    ) -> None:
        """Write a line for each of this rank's ``tensors`` of a message."""
        purpose = "activation" if channel.direction == "F" else "gradient"
        for index, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
            packed = {"compression": scheme} if packs(scheme, spec) else {}
            self.write(
                purpose,
                call,
                wire_bytes(scheme, spec, tensor.shape),
                channel=channel.name,
                microbatch=microbatch,
                tensor=index,
                shape=list(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                **packed,
            )


class Guard:
    """Refuses tensors that overlap protected memory: samples, labels, and the losses of this step and the last.

    Protected are tensors and NumPy-compatible arrays, also inside lists, dicts and other mappings. With ``copies`` a
    tensor of equal contents is refused, too, which costs comparisons and, on a device, a wait. Partial copies are not
    detected.
    """

    def __init__(
        self, microbatches: Iterable[Microbatch], copies: bool = False, earlier: Guard | None = None
    ) -> None:
        self._protected: list[_ProtectedMemory] = []
        self._losses: list[_ProtectedMemory] = []
        for loss in [] if earlier is None else earlier._losses:
            self._protected.append(loss._replace(what="a loss of the step before"))
        for index, microbatch in enumerate(microbatches):
            for where, value in (
                ("inputs", (microbatch.args, microbatch.kwargs)),
                ("target", microbatch.target),
            ):
                self._protect(f"the {where} of microbatch {index}", value)
        self._copies = copies

    def add_loss(self, microbatch: int, loss: torch.Tensor) -> None:
        """Refuse ``loss`` in this step and the next. Keeps no reference: a loss may be a view of a large tensor."""
        for own in _tensors_in(loss.detach()):
            memory = _ProtectedMemory.of(f"the loss of microbatch {microbatch}", own, hold=False)
            self._losses.append(memory)
            self._protected.append(memory)

    def end(self) -> None:
        """Release the samples at the end of the step."""
        self._protected.clear()

    def check(self, tensors: Iterable[torch.Tensor], where: str) -> None:
        """Raise ValueError if one of ``tensors`` must not be sent; texts call the message ``where``."""
        for tensor in filter(torch.Tensor.numel, tensors):
            what = self._find_overlap(tensor) or (self._find_copy(tensor) if self._copies else None)
            if what is not None:
                raise InputValueError(
                    f"{where} would send {what} to the cloud: samples, labels and losses stay on the edge. Send the "
                    "output of a layer instead"
                )

    def _protect(self, what: str, value: object) -> None:
        for tensor in _tensors_in(value):
            self._protected.append(_ProtectedMemory.of(what, tensor))

    def _find_overlap(self, tensor: torch.Tensor) -> str | None:
        start, stop = _extent(tensor)
        found = (
            memory.what
            for memory in self._protected
            if memory.start < stop
            and start < memory.stop
            and memory.device == tensor.device
            and memory.is_alive
        )
        return next(found, None)

    def _find_copy(self, tensor: torch.Tensor) -> str | None:
        """Find a tensor of equal values. Skips tensors of one or two elements, and constants: they match by chance."""
        values = _values(tensor)
        if values.numel() <= 2 or bool((values == values[0]).all()):
            return None
        for what, own in (
            (memory.what, memory.tensor) for memory in self._protected if memory.tensor is not None
        ):
            alike = own.numel() == tensor.numel() and own.device == tensor.device
            if alike and torch.equal(_values(own), values):
                return f"a copy of {what}"
        return None


class _ProtectedMemory(NamedTuple):
    """Memory that must not be sent, by its addresses."""

    what: str
    tensor: torch.Tensor | None  # keeps the memory allocated
    device: torch.device
    start: int
    stop: int
    memory: weakref.ref[torch.UntypedStorage]

    @classmethod
    def of(cls, what: str, tensor: torch.Tensor, hold: bool = True) -> _ProtectedMemory:
        memory = weakref.ref(tensor.untyped_storage())
        return cls(what, tensor if hold else None, tensor.device, *_extent(tensor), memory)

    @property
    def is_alive(self) -> bool:
        """Whether the memory is still allocated; freed addresses may belong to another tensor by now."""
        return self.tensor is not None or self.memory() is not None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first element and the end address of the last."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a flat complex128 tensor, so that a copy in another dtype compares equal."""
    return tensor.detach().reshape(-1).to(torch.complex128)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that own memory: those inside a wrapper (DTensor), and a tensor over an array's memory."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from unwrapped_tensors(leaf)
        elif isinstance(leaf, Mapping):
            yield from _tensors_in(list(leaf.values()))
        elif hasattr(leaf, "__array_interface__"):
            with contextlib.suppress(TypeError, ValueError):  # a dtype that torch does not have
                yield torch.as_tensor(leaf, device="cpu")
