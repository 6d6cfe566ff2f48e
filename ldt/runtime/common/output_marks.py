"""None entries and names in what a chunk returns, as tensors without elements.

They take no bytes of a message, and all ranks know them from the specs that are agreed ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ldt.runtime.common.tensor_spec import MARK_DTYPE, TensorSpec, is_mark

__all__ = ["decode", "encode_names", "encode_none", "num_positional"]

_NONE, _NAMES, _LETTERS = range(1, 4)  # the third dimension of a mark; the fourth is a number
_LETTERS_IN_ONE = 6  # 8 bits each, so that sizes and strides stay below 2^63


def encode_none(device: torch.device) -> torch.Tensor:
    """Return what stands for None."""
    return _mark(_NONE, 0, device)


def encode_names(named: Mapping[str, torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the number of entries, and for each its name and its tensor."""
    yield _mark(_NAMES, len(named), device)
    for name, tensor in named.items():
        data = name.encode()
        for start in range(0, len(data), _LETTERS_IN_ONE):
            yield _mark(_LETTERS, int.from_bytes(data[start : start + _LETTERS_IN_ONE], "big"), device)
        yield tensor


def decode(values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional arguments and the keywords in the tensors, or specs, of a hop."""
    args: list[Any] = []
    named: dict[str, Any] = {}
    rest = iter(values)
    for value in rest:
        kind, number = _kind_of(value)
        if kind == _NAMES:
            named |= dict(_read_names(rest, number))
        else:
            args.append(None if kind == _NONE else value)
    return args, named


def num_positional(values: Sequence[Any]) -> int:
    """The number of positional arguments in the tensors, or specs, of a hop."""
    return len(decode(values)[0])


def _read_names(rest: Iterator[Any], number: int) -> Iterator[tuple[str, Any]]:
    for _ in range(number):
        data = b""
        value = next(rest)
        while (found := _kind_of(value))[0] == _LETTERS:
            data += found[1].to_bytes(_LETTERS_IN_ONE, "big").lstrip(b"\0")
            value = next(rest)
        yield data.decode(), None if found[0] == _NONE else value


def _mark(kind: int, number: int, device: torch.device) -> torch.Tensor:
    return torch.empty((0, 0, kind, number), dtype=MARK_DTYPE, device=device)


def _kind_of(value: Any) -> tuple[int, int]:
    if isinstance(value, (torch.Tensor, TensorSpec)) and is_mark(value):
        return value.shape[2], value.shape[3]
    return 0, 0
