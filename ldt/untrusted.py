"""What others wrote, in files or messages, read with care: it may be damaged, of another version, or made to harm."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from typing import Any, TypeVar

from ldt.schema import fit, fit_fields

__all__ = ["MOST_CHARACTERS", "parse", "parse_file", "plain", "quoted", "read_fields", "read_file"]

MOST_CHARACTERS = 4000  # of a text that is shown
_FIELD_LIMIT = 4 * MOST_CHARACTERS  # of a text in a report, which may show a picture of all nodes
_QUOTED = 200
_T = TypeVar("_T")


def plain(text: str, limit: int = MOST_CHARACTERS) -> str:
    """At most ``limit`` characters, and none that a terminal would obey or a file could not hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text[:limit])


def quoted(value: object) -> str:
    """The beginning of a value, for the text of an error."""
    begun = value[:_QUOTED] if isinstance(value, (str, bytes)) else value
    return plain(repr(begun), _QUOTED)


# -- messages ------------------------------------------------------------------------------------------------------


def parse(data: str | bytes) -> Any:
    """What JSON in ``data`` stands for. Raises ValueError, and nothing else, for whatever else it may be."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_fields(kind: Callable[..., _T], data: str | bytes) -> _T:
    """The dataclass ``kind`` whose fields are an object of JSON. Texts come back ``plain``, of at most 16000 letters.

    Raises ValueError for what has other fields, or others than these in them; see ``ldt.schema``.
    """
    found = {name: _short(value) for name, value in fit_fields(parse(data), kind).items()}
    return kind(**found)


def _short(value: Any) -> Any:
    return plain(value, _FIELD_LIMIT) if isinstance(value, str) else value


# -- files ---------------------------------------------------------------------------------------------------------


def read_file(file: str | os.PathLike[str], most_bytes: int) -> bytes:
    """What is in a regular file. Raises ValueError for a pipe, a device, a folder, and for more bytes; OSError."""
    handle = os.open(
        file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
    )  # else the open of a pipe may wait for ever
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("expected a regular file, got a folder, a pipe or a device")
        if status.st_size > most_bytes:
            raise ValueError(f"expected at most {most_bytes} bytes, got {status.st_size}")
        with open(handle, "rb", closefd=False) as stream:
            return stream.read(status.st_size)
    finally:
        os.close(handle)


def parse_file(data: str | bytes, kind: Callable[..., _T]) -> _T:
    """What a whole file of JSON stands for, as the type, or dataclass, ``kind``; see ``ldt.schema``.

    Raises ValueError, and nothing else, for what is no text in UTF-8 or no JSON, is nested too deeply, has a key twice
    or a number beyond those of double precision, or is not of this ``kind``. No text of it quotes what is in the file.
    """
    text = data if isinstance(data, str) else _decoded(data)
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_float=_number)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"it is not JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    made: _T = fit(value, kind)
    return made


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not a text in UTF-8: byte {error.start} is not") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object in it has a key twice")
    return made


def _number(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("a number in it is beyond those of double precision")
    return value
