"""Plain values as JSON and back: with tuples, dicts whose keys are no strings, and tensors that are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ldt.errors import CheckpointError
from ldt.runtime.common.redact import QuotingError

__all__ = ["ValueTypeError", "from_json", "to_json"]

_TUPLE, _PAIRS, _TENSOR = "$tuple", "$pairs", "$tensor"
Keep = Callable[[torch.Tensor], str]  # puts a tensor elsewhere, and gives the name that it has there


class DamagedValueError(CheckpointError, QuotingError):
    """For what ``to_json`` does not write; it may be of the edge's data."""


class ValueTypeError(QuotingError, TypeError):
    """For a value of another type. Keys, which may be those of the edge's data, are not told to other ranks."""

    def __init__(self, what: str, value: object) -> None:
        rest = (
            f"is a {type(value).__name__}, which a checkpoint cannot keep beside its tensors: expected None, bool, "
            "int, float, str, or lists, tuples and dicts of these"
        )
        super().__init__(f"{what} {rest}", f"a part of {what.partition('[')[0]} {rest}")


def to_json(value: Any, what: str, keep: Keep | None = None) -> Any:
    """``value`` in types of JSON; ``what`` is its name in errors.

    Takes None, bool, int, float, str, lists, tuples and dicts of these, and tensors: with ``keep`` any, else those of
    one real element as their number.
    Raises ValueTypeError that names the part which is something else.
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
    ):  # a named tuple would come back as none
        items = [to_json(item, f"{what}[{index}]", keep) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    raise ValueTypeError(what, value)


def _mapping(value: Mapping[Any, Any], what: str, keep: Keep | None) -> Any:
    items = {key: to_json(item, f"{what}[{key!r}]", keep) for key, item in value.items()}
    if all(isinstance(key, str) for key in items) and not items.keys() & {_TUPLE, _PAIRS, _TENSOR}:
        return items
    return {_PAIRS: [[to_json(key, f"a key of {what}"), item] for key, item in items.items()]}


def from_json(value: Any, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
    """What ``to_json`` was given, where ``tensor`` gives what it kept.

    Raises CheckpointError for what it does not write.
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
    except TypeError as error:  # a tuple of lists is no key
        text = "a file of this checkpoint is damaged: expected keys"
        raise DamagedValueError(f"{text}, got {str(pairs)[:80]}", text) from error


def _pair(pair: Any, tensor: Callable[[str], torch.Tensor] | None) -> tuple[Any, Any]:
    match pair:
        case [key, item] if not isinstance(key, (list, dict)) or _TUPLE in key:
            return from_json(key), from_json(item, tensor)
    text = "a file of this checkpoint is damaged: expected a key and its value"
    raise DamagedValueError(f"{text}, got {str(pair)[:80]}", text)
