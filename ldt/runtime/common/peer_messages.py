"""Validates data from other ranks, which may run another version or be compromised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ldt.errors import LdtError
from ldt.untrusted import parse, plain, quoted, read_fields

__all__ = ["as_str_dict", "as_str_list", "parse", "plain", "quoted", "read_fields", "read_or_raise"]

_T = TypeVar("_T")


def read_or_raise(value: Any, read: Callable[[Any], _T], who: str) -> _T:
    """``read(value)``. Raises LdtError naming the sender ``who`` if ``read`` rejects it."""
    try:
        return read(value)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise LdtError(
            f"{who} sent malformed data {quoted(value)}: check that all ranks run the same version of this package"
        ) from error


def as_str_dict(value: Any) -> dict[str, str]:
    """``value`` if it is a dict of strings. Raises TypeError otherwise."""
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return value
    raise TypeError("expected a dict of strings")


def as_str_list(value: Any) -> list[str]:
    """``value`` if it is a list of strings. Raises TypeError otherwise."""
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return value
    raise TypeError("expected a list of strings")
