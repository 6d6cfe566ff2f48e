"""Plain values as JSON and back: with tuples, and with dicts whose keys are no strings, as schedulers have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ldt.errors import CheckpointError
from ldt.runtime.disclosure import QuotingError

__all__ = ["ValueTypeError", "from_json", "to_json"]

_TUPLE, _PAIRS = "$tuple", "$pairs"


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


def to_json(value: Any, what: str) -> Any:
    """``value`` in types of JSON; ``what`` is its name in errors.

    Takes None, bool, int, float, str, lists, tuples and dicts of these, and tensors of one element as their number.
    Raises ValueTypeError that names the part which is something else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return _mapping(value, what)
    if isinstance(value, (list, tuple)):
        items = [to_json(item, f"{what}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    raise ValueTypeError(what, value)


def _mapping(value: Mapping[Any, Any], what: str) -> Any:
    items = {key: to_json(item, f"{what}[{key!r}]") for key, item in value.items()}
    if all(isinstance(key, str) for key in items) and not items.keys() & {_TUPLE, _PAIRS}:
        return items
    return {_PAIRS: [[to_json(key, f"a key of {what}"), item] for key, item in items.items()]}


def from_json(value: Any) -> Any:
    """What ``to_json`` was given. Raises CheckpointError for what it does not write."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tuple": list(items)}:
            return tuple(from_json(item) for item in items)
        case {"$pairs": list(pairs)}:
            return _from_pairs(pairs)
    return {key: from_json(item) for key, item in value.items()}


def _from_pairs(pairs: list[Any]) -> dict[Any, Any]:
    try:
        return dict(_pair(pair) for pair in pairs)
    except TypeError as error:  # a tuple of lists is no key
        text = "a file of this checkpoint is damaged: expected keys"
        raise DamagedValueError(f"{text}, got {str(pairs)[:80]}", text) from error


def _pair(pair: Any) -> tuple[Any, Any]:
    match pair:
        case [key, item] if not isinstance(key, (list, dict)) or _TUPLE in key:
            return from_json(key), from_json(item)
    text = "a file of this checkpoint is damaged: expected a key and its value"
    raise DamagedValueError(f"{text}, got {str(pair)[:80]}", text)
