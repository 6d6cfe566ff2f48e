"""Parses untrusted files and messages, which may be damaged, of another version, or malicious."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import stat
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from ldt.schema import fit, fit_fields

__all__ = [
    "MAX_CHARACTERS",
    "decompressed",
    "parse",
    "parse_file",
    "plain",
    "quoted",
    "read_fields",
    "read_file",
]

MAX_CHARACTERS = 4000  # of a text that is shown
_FIELD_LIMIT = 4 * MAX_CHARACTERS  # of a text in a report, which may show the rows of all nodes
_QUOTED = 200
_GZIP = b"\x1f\x8b"
_T = TypeVar("_T")


def plain(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Return at most ``limit`` characters, with control characters replaced."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text[:limit])


def quoted(value: object) -> str:
    """Return the beginning of a value, for the text of an error."""
    start = value[:_QUOTED] if isinstance(value, (str, bytes)) else value
    return plain(repr(start), _QUOTED)


# -- messages ------------------------------------------------------------------------------------------------------


def parse(data: str | bytes) -> Any:
    """Parse JSON. Raises only ValueError, whatever ``data`` is."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_fields(kind: Callable[..., _T], data: str | bytes) -> _T:
    """Parse a JSON object into the dataclass ``kind``. Texts are made ``plain`` and cut to 16000 characters.

    Raises ValueError for other fields or other types in them; see ``ldt.schema``.
    """
    found = {name: _short(value) for name, value in fit_fields(parse(data), kind).items()}
    return kind(**found)


def _short(value: Any) -> Any:
    return plain(value, _FIELD_LIMIT) if isinstance(value, str) else value


# -- files ---------------------------------------------------------------------------------------------------------


def read_file(file: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a regular file. Raises OSError, or ValueError for a pipe, device or folder and for a larger file."""
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # opening a pipe may block otherwise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("expected a regular file, got a folder, a pipe or a device")
        if status.st_size > max_bytes:
            raise ValueError(f"expected at most {max_bytes} bytes, got {status.st_size}")
        with open(handle, "rb", closefd=False) as stream:
            return stream.read(status.st_size)
    finally:
        os.close(handle)


def decompressed(data: bytes, max_bytes: int) -> bytes:
    """Return ``data``, decompressed if it is of gzip. Raises ValueError if it is damaged or gets too long."""
    if not data.startswith(_GZIP):
        return data
    try:
        with gzip.open(io.BytesIO(data)) as stream:
            data = stream.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it is compressed and damaged: {error}") from None
    if len(data) > max_bytes:
        raise ValueError(f"expected at most {max_bytes} bytes, it decompresses to more")
    return data


def parse_file(data: str | bytes, kind: Callable[..., _T]) -> _T:
    """Parse a whole JSON file into ``kind``, a type or dataclass; see ``ldt.schema``.

    Raises only ValueError: for text that is not UTF-8 or not JSON, is nested too deeply, has a duplicate key or a
    number beyond double precision, or does not fit ``kind``. The text never quotes the file.
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
        raise ValueError(f"it is not UTF-8 text: byte {error.start} is invalid") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object in it has a duplicate key")
    return made


def _number(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("a number in it is beyond double precision")
    return value
