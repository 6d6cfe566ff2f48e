"""What leaves the edge: refused where it is a sample, a label or a loss, and written down if asked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ldt.runtime.disclosure import InputValueError
from ldt.runtime.microbatch import Microbatch

__all__ = ["Audit", "Guard"]


class Audit:
    """Writes a line of JSON for all that a rank of the edge sends in its calls, to ``path``, which must be new.

    Of an "activation" or a "gradient": the call's number, channel, microbatch and tensor, its shape, dtype and bytes as
    this rank has them. Of "metadata" and "tokens", which go to each other node: the call and the bytes. Raises OSError.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("x", encoding="utf-8")  # noqa: SIM115 (as long as the pipeline lives)

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
    """Knows the tensors that may not leave: those of samples and labels, and losses as they come, of two steps.

    With ``copies`` also tensors of their contents, whatever their memory, which costs comparisons and, on a device,
    waits for it.
    """

    def __init__(
        self, microbatches: Iterable[Microbatch], copies: bool = False, earlier: Guard | None = None
    ) -> None:
        self._kept: dict[
            int, tuple[str, torch.Tensor]
        ] = {}  # by memory; holding them keeps the memory theirs
        self._copies = copies
        self._losses: list[torch.Tensor] = []
        for loss in [] if earlier is None else earlier._losses:
            self._keep("a loss of the step before", loss)
        for index, microbatch in enumerate(microbatches):
            for where, value in (
                ("inputs", (microbatch.args, microbatch.kwargs)),
                ("target", microbatch.target),
            ):
                for tensor in _tensors_in(value):
                    self._keep(f"the {where} of microbatch {index}", tensor)

    def add_loss(self, microbatch: int, loss: torch.Tensor) -> None:
        """Refuse it from now on, in this step and the next."""
        self._losses.append(loss.detach())
        self._keep(f"the loss of microbatch {microbatch}", loss.detach())

    def _keep(self, what: str, tensor: torch.Tensor) -> None:
        self._kept.setdefault(tensor.untyped_storage().data_ptr(), (what, tensor))

    def check(self, tensors: Iterable[torch.Tensor], where: str) -> None:
        """Raise ValueError if one of ``tensors``, which are about to leave over ``where``, may not."""
        for tensor in tensors:
            what = self._known(tensor)
            if what is not None:
                raise InputValueError(
                    f"{where} would send {what} to the cloud: samples, labels and losses stay on the edge. Send what a "
                    "layer made of them"
                )

    def _known(self, tensor: torch.Tensor) -> str | None:
        if tensor.numel() == 0:
            return None
        found = self._kept.get(tensor.untyped_storage().data_ptr())
        if found is not None:
            return found[0]
        return next(self._copied(tensor), None) if self._copies else None

    def _copied(self, tensor: torch.Tensor) -> Iterator[str]:
        """Things of equally many elements and equal values. Of one or two elements that is chance."""
        for what, kept in self._kept.values():
            if kept.numel() == tensor.numel() > 2 and kept.device == tensor.device:
                flat = kept.detach().reshape(-1)
                if torch.equal(flat.to(torch.float64), tensor.detach().reshape(-1).to(torch.float64)):
                    yield f"a copy of {what}"


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """With memory of their own: of one that wraps others (DTensor), those."""
    for leaf in pytree.tree_leaves(value):
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from _tensors_in([getattr(leaf, name) for name in names])
        elif isinstance(leaf, torch.Tensor):
            yield leaf
