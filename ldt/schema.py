"""Validates JSON values against types: a dataclass and its annotations are the schema of a file or a message.

Supported types: None, bool, int, float, str, Any, Literal, list[T], tuple[T, ...], tuple[T, U], dict[str, T], unions
of these, and dataclasses of these. The object of a dataclass must have every field without a default and no unknown
fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["fit", "fit_fields", "suggestion"]

_MAX_INT = 1 << 63  # ints are not negative
_MAX_DEPTH = 100  # levels of lists and objects, which makes recursion safe
_SHOWN, _SHOWN_LENGTH = 3, 40  # unknown fields in an error, and characters of each
_LEAST_ALIKE = 0.5  # half of the characters of two names
_T = TypeVar("_T")


def fit(value: Any, kind: Callable[..., _T] | Any, where: str = "it") -> Any:
    """Convert ``value`` to ``kind``: lists become tuples, and objects dataclasses, where ``kind`` says so.

    Ints are from 0 to 2**63; floats are finite and may be written as ints. ``where`` names the value in errors. Raises
    ValueError for anything else, and for an Any with more than 100 levels. The text never quotes the value.
    """
    if kind is Any:
        _check_depth(value, where)
        return value
    if dataclasses.is_dataclass(kind):
        made: Any = kind
        return made(**fit_fields(value, made, where))
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, types.UnionType):
        return _fit_union(value, arguments, where)
    if origin is Literal and any(type(value) is type(one) and value == one for one in arguments):
        return value
    if origin in _PLAIN and _PLAIN[origin](value):
        return value
    if origin in _NESTED and isinstance(value, dict if origin is dict else list):
        return _NESTED[origin](value, arguments, where)
    raise ValueError(f"{where} is {_named(value)}, expected {_name_of(kind)}")


def fit_fields(value: Any, kind: Callable[..., Any], where: str = "it") -> dict[str, Any]:
    """Convert the object ``value`` to the fields of the dataclass ``kind``.

    Raises ValueError as ``fit`` does. Of unknown fields it shows the names, and which field each may be meant to be.
    """
    hints = _hints(kind)
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_named(value)}, expected an object with the fields {', '.join(hints)}")
    lacking = [f"lacks {name!r}" for name, (_, needed) in hints.items() if needed and name not in value]
    others = [name[:_SHOWN_LENGTH] for name in sorted(value.keys() - hints.keys())[:_SHOWN]]
    unknown = [f"has a field {name!r}{suggestion(name, hints.keys() - value.keys())}" for name in others]
    if lacking or unknown:
        problem = " and ".join(lacking[:1] + unknown)
        raise ValueError(f"{where} {problem}: expected an object with the fields {', '.join(hints)}")
    return {name: fit(item, hints[name][0], name) for name, item in value.items()}


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the name in ``known`` that is most like ``name``; "" if none is like it."""
    close = difflib.get_close_matches(name, known, 1, _LEAST_ALIKE)
    return f" (did you mean {close[0]!r}?)" if close else ""


@functools.cache
def _hints(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each field, and whether an object must have it."""
    hints = get_type_hints(kind)
    return {
        field.name: (hints[field.name], field.default is field.default_factory is dataclasses.MISSING)
        for field in dataclasses.fields(kind)
    }


def _fit_union(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    for kind in kinds:
        try:
            return fit(value, kind, where)
        except ValueError as error:
            if (get_origin(kind) or kind) is type(value) or (
                dataclasses.is_dataclass(kind) and isinstance(value, dict)
            ):
                raise error from None  # an error inside the value
    raise ValueError(f"{where} is {_named(value)}, expected {' or '.join(map(_name_of, kinds))}")


def _fit_list(value: list[Any], kinds: tuple[Any, ...], where: str) -> list[Any]:
    kind = kinds[0]
    return [fit(item, kind, f"an item of {where}") for item in value]


def _fit_tuple(value: list[Any], kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if kinds[1:] == (...,):
        return tuple(_fit_list(value, kinds, where))
    if len(value) != len(kinds):
        raise ValueError(f"{where} has {len(value)} items, expected {len(kinds)}")
    return tuple(fit(item, kind, f"an item of {where}") for item, kind in zip(value, kinds, strict=True))


def _fit_dict(value: dict[str, Any], kinds: tuple[Any, ...], where: str) -> dict[str, Any]:
    kind = kinds[1]
    return {key: fit(item, kind, f"a value of {where}") for key, item in value.items()}


def _check_depth(value: Any, where: str) -> None:
    level: Iterable[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise ValueError(f"{where} is nested too deeply")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_INT


def _is_real(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= _MAX_INT
    return type(value) is float and math.isfinite(value)


_PLAIN: dict[Any, Callable[[Any], bool]] = {
    types.NoneType: lambda value: value is None,
    bool: lambda value: type(value) is bool,
    int: _is_whole,
    float: _is_real,
    str: lambda value: isinstance(value, str),
}
_NESTED: dict[Any, Callable[[Any, Any, str], Any]] = {list: _fit_list, tuple: _fit_tuple, dict: _fit_dict}
_NAMES = {
    dict: "an object",
    list: "a list",
    tuple: "a list",
    str: "a text",
    bool: "true or false",
    types.NoneType: "null",
}
_NUMBERS = {int: "a whole number of at least 0", float: "a finite number"}


def _named(value: Any) -> str:
    other = "another number" if isinstance(value, (int, float)) else f"a {type(value).__name__}"
    return _NAMES.get(type(value), other)


def _name_of(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _NAMES.get(origin) or _NUMBERS.get(origin) or "an object"
