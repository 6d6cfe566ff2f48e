"""Reads untrusted files of a checkpoint against a schema and a size limit. Errors name the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ldt.train.checkpoint.layout import StorageError
from ldt.untrusted import parse_file, read_file

__all__ = ["damaged", "read_bytes", "read_json"]

MAX_BYTES = 256 << 20  # of a file without tensors
_T = TypeVar("_T")


def damaged(file: Path, problem: str) -> StorageError:
    """Return the error for a file or folder."""
    return StorageError.of(file, f"is damaged: {problem}")


def read_bytes(file: Path) -> bytes:
    """Read ``file``. Raises OSError, or CheckpointError if it is not a regular file or too large."""
    try:
        return read_file(file, MAX_BYTES)
    except ValueError as error:
        raise damaged(file, str(error)) from error


def read_json(file: Path, kind: Callable[..., _T]) -> tuple[bytes, _T]:
    """Read ``file`` and parse it into ``kind``. Raises OSError, or CheckpointError if it does not fit."""
    data = read_bytes(file)
    return data, parse_json(file, data, kind)


def parse_json(file: Path, data: bytes, kind: Callable[..., _T]) -> _T:
    """Parse ``data``, read from ``file``, into ``kind``. Raises CheckpointError if it does not fit."""
    try:
        return parse_file(data, kind)
    except ValueError as error:
        raise damaged(file, str(error)) from error
