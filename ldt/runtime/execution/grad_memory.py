"""Gives gradients of parameters separate memory, so that changing one in place changes no other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ldt._C import is_memory_own
from ldt.runtime.model.module_state import unwrapped_tensors

__all__ = ["GradMemory"]


class GradMemory:
    """Checks each gradient of a step once, after the backward that created it.

    Autograd keeps the tensor that reaches a parameter as its ``grad``. Where views of one tensor reach two parameters,
    as for ``x + p.unsqueeze(0) + q.unsqueeze(0)``, accumulating, dividing or clipping one gradient would change both.
    """

    def __init__(self) -> None:
        self._without: dict[
            int, list[nn.Parameter]
        ] = {}  # by chunk, the parameters without a gradient so far

    def separate(self, chunk: int, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Copy new gradients that overlap others in memory. ``parameters`` are all that the chunk trains.

        Returns the parameters that have new gradients.
        """
        pending = self._without[chunk] if chunk in self._without else list(parameters)
        self._without[chunk] = [parameter for parameter in pending if parameter.grad is None]
        if not is_memory_own([parameter.grad for parameter in pending]):
            _copy_overlapping(pending)
        return [parameter for parameter in pending if parameter.grad is not None]


def _copy_overlapping(parameters: Iterable[nn.Parameter]) -> None:
    spans = [span for parameter in parameters for span in _spans(parameter)]
    last = 0
    for start, end, parameter in sorted(spans, key=lambda span: span[:2]):
        if start < last and parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
        last = max(last, end)


def _spans(parameter: nn.Parameter) -> Iterator[tuple[int, int, nn.Parameter]]:
    """The address ranges of its gradient."""
    for part in () if parameter.grad is None else map(_values, unwrapped_tensors(parameter.grad)):
        if part.layout is torch.strided and part.numel() and (start := part.data_ptr()):
            last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            yield start, start + (last + 1) * part.element_size(), parameter


def _values(part: torch.Tensor) -> torch.Tensor:
    return part._values() if part.layout is torch.sparse_coo else part
