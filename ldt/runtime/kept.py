"""The tensors that a module keeps from one forward to the next, other than its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["kept_tensors"]


def kept_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Buffers and attributes of ``module`` and its parts, and the entries of attributes that are lists, tuples, dicts.

    Only plain tensors with memory of their own: a hop carries no other ones.
    """
    for part in module.modules():
        for name, value in part.__dict__.items():
            if name != "_parameters":
                yield from filter(_has_memory, _entries(value))


def _entries(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value
    return value.values() if isinstance(value, Mapping) else (value,)


def _has_memory(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided
