"""Nested values as the tensors of a hop: what a layer of transformers gets beside hidden states, and keeps for later.

Tensors cross as they are. None, numbers and tuples cross as tensors without elements, whose shapes say what they are:
so they take no bytes of a message, and every rank knows them from the specs that are agreed ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ldt.runtime.common.tensor_spec import TensorSpec

__all__ = ["decode", "encode", "encode_specs"]

_NONE, _NUMBER, _TUPLE = 1, 2, 3  # the second dimension of a mark
_MARK = torch.uint8


def encode(values: Sequence[Any], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the tensors of ``values``: tensors, None, whole numbers from 0, and tuples or lists of these."""
    return tuple(_flat(values, lambda shape: torch.empty(shape, dtype=_MARK, device=device)))


def encode_specs(values: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Likewise for values with specs in place of tensors."""
    return tuple(_flat(values, lambda shape: TensorSpec(shape, _MARK)))


def decode(hop: Sequence[Any]) -> list[Any]:
    """Return the values from which ``hop`` was made, its tensors or specs."""
    rest, values = iter(hop), []
    for item in rest:
        values.append(_value(item, rest))
    return values


def _flat(values: Sequence[Any], mark: Callable[[tuple[int, ...]], Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.contiguous()
        elif isinstance(value, TensorSpec):
            yield value
        elif value is None:
            yield mark((0, _NONE, 0))
        elif isinstance(value, int):
            yield mark((0, _NUMBER, int(value)))
        elif isinstance(value, (tuple, list)):
            yield mark((0, _TUPLE, len(value)))
            yield from _flat(value, mark)
        else:
            raise ValueError(f"layers get a {type(value).__name__}, which does not cross to another stage")


def _value(item: Any, rest: Iterator[Any]) -> Any:
    if item.dtype != _MARK or len(item.shape) != 3 or item.shape[0]:
        return item
    kind, number = item.shape[1:]
    if kind == _TUPLE:
        return tuple(_value(next(rest), rest) for _ in range(number))
    return None if kind == _NONE else int(number)
