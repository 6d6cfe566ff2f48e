"""What other ranks wrote, read with care: they may run another version, or be in somebody else's hands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from ldt.errors import LdtError
from ldt.runtime.error_text import TEXT_LIMIT, plain

__all__ = ["parse", "plain", "quoted", "read_fields", "texts", "texts_by_name", "understood"]

_MAX_NUMBER = 1 << 53  # beyond, other readers of JSON round
_QUOTED = 200
_FIELD_LIMIT = 4 * TEXT_LIMIT  # of a text in a report, which may show a picture of all nodes
_T = TypeVar("_T")


def parse(data: str | bytes) -> Any:
    """What JSON in ``data`` stands for. Raises ValueError, and nothing else, for whatever else it may be."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def quoted(value: object) -> str:
    """The beginning of a value, for the text of an error."""
    begun = value[:_QUOTED] if isinstance(value, (str, bytes)) else value
    return plain(repr(begun), _QUOTED)


def understood(value: Any, read: Callable[[Any], _T], who: str) -> _T:
    """``read(value)``. Raises LdtError naming ``who`` gave it if that is not what ``read`` takes."""
    try:
        return read(value)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise LdtError(
            f"{who} sent something of another form than expected, {quoted(value)}: do all ranks run the same version "
            "of this package?"
        ) from error


def texts_by_name(value: Any) -> dict[str, str]:
    """``value`` if it is a dict of texts. Raises TypeError otherwise."""
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return value
    raise TypeError("expected texts by name")


def texts(value: Any) -> list[str]:
    """``value`` if it is a list of texts. Raises TypeError otherwise."""
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return value
    raise TypeError("expected a list of texts")


def read_fields(kind: Callable[..., _T], data: str | bytes) -> _T:
    """The dataclass ``kind`` whose fields are an object of JSON. Texts come back ``plain``, of at most 16000 letters.

    Fields may be ``str``, ``int``, which are not negative, or one of these and None. Raises ValueError for what has
    other fields, or others than these in them.
    """
    found = parse(data)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    needed = {name for name, field in known.items() if field.default is MISSING}
    if not isinstance(found, dict) or not needed <= set(found) <= set(known):
        raise ValueError(f"expected an object with the fields {', '.join(known)}")
    return kind(**{name: _field(name, str(known[name].type), value) for name, value in found.items()})


def _field(name: str, kind: str, value: Any) -> Any:
    """``kind`` is an annotation such as "int | None"."""
    kinds = kind.split(" | ")
    if value is None and "None" in kinds:
        return None
    if isinstance(value, str) and "str" in kinds:
        return plain(value, _FIELD_LIMIT)
    if type(value) is int and "int" in kinds and 0 <= value <= _MAX_NUMBER:
        return value
    raise ValueError(f"expected {kind} as {name}, got {quoted(value)}")
