"""Converts plain values to JSON and back, including tuples, dicts with non-string keys, and tensors kept elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ldt.errors import CheckpointError
from ldt.runtime.common.redact import QuotingError

__all__ = ["ValueTypeError", "from_json", "to_json"]

_TUPLE, _PAIRS, _TENSOR = "$tuple", "$pairs", "$tensor"
Keep = Callable[[torch.Tensor], str]  # stores a tensor elsewhere and returns its name there


class DamagedValueError(CheckpointError, QuotingError):
    """A value that ``to_json`` does not write. It may contain the edge's data."""


class ValueTypeError(QuotingError, TypeError):
    """A value of an unsupported type. Other ranks do not see keys, which may be the edge's data."""

    def __init__(self, what: str, value: object) -> None:
        rest = (
            f"is a {type(value).__name__}, which a checkpoint cannot keep beside its tensors: expected None, bool, "
            "int, float, str, or lists, tuples and dicts of these"
        )
        super().__init__(f"{what} {rest}", f"a part of {what.partition('[')[0]} {rest}")


def to_json(value: Any, what: str, keep: Keep | None = None) -> Any:
    """Convert ``value`` to JSON types; ``what`` names it in errors.

    Supports None, bool, int, float, str, lists, tuples and dicts of these, and tensors: all with ``keep``, otherwise
    those of one real element, as a number. Raises ValueTypeError naming the part of another type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and keep is not None:
        return {_TENSOR: keep(value)}
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.item()
    if isinstance(value, Mapping):
        return _mapping(value, what, keep)
    if isinstance(value, (list, tuple)) and not hasattr(
        value, "_fields"
    ):  # a named tuple would lose its type
        items = [to_json(item, f"{what}[{index}]", keep) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    raise ValueTypeError(what, value)


def _mapping(value: Mapping[Any, Any], what: str, keep: Keep | None) -> Any:
    items = {key: to_json(item, f"{what}[{key!r}]", keep) for key, item in value.items()}
    if all(isinstance(key, str) for key in items) and not items.keys() & {_TUPLE, _PAIRS, _TENSOR}:
        return items
    return {_PAIRS: [[to_json(key, f"a key of {what}"), item] for key, item in items.items()]}


def from_json(value: Any, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
    """Invert ``to_json``; ``tensor`` returns a tensor by the name under which it was kept.

    Raises CheckpointError for anything that ``to_json`` does not write.
    """
    if isinstance(value, list):
        return [from_json(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tuple": list(items)}:
            return tuple(from_json(item, tensor) for item in items)
        case {"$pairs": list(pairs)}:
            return _from_pairs(pairs, tensor)
        case {"$tensor": str(name)} if tensor is not None:
            return tensor(name)
    return {key: from_json(item, tensor) for key, item in value.items()}


def _from_pairs(pairs: list[Any], tensor: Callable[[str], torch.Tensor] | None) -> dict[Any, Any]:
    try:
        return dict(_pair(pair, tensor) for pair in pairs)
    except TypeError as error:  # an unhashable key, such as a tuple of lists
        text = "a file of this checkpoint is damaged: expected keys"
        raise DamagedValueError(f"{text}, got {str(pairs)[:80]}", text) from error


def _pair(pair: Any, tensor: Callable[[str], torch.Tensor] | None) -> tuple[Any, Any]:
    match pair:
        case [key, item] if not isinstance(key, (list, dict)) or _TUPLE in key:
            return from_json(key), from_json(item, tensor)
    text = "a file of this checkpoint is damaged: expected a key and its value"
    raise DamagedValueError(f"{text}, got {str(pair)[:80]}", text)
