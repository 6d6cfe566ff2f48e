"""Files of a checkpoint, read with care: each has a schema and a limit, and what is wrong is said with its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ldt.train.checkpoint.layout import StorageError
from ldt.untrusted import parse_file, read_file

__all__ = ["damaged", "read_bytes", "read_json"]

MOST_BYTES = 256 << 20  # of one, the tensors apart
_T = TypeVar("_T")


def damaged(file: Path, problem: str) -> StorageError:
    """The error for ``file``, or for a folder."""
    return StorageError.of(file, f"is damaged: {problem}")


def read_bytes(file: Path) -> bytes:
    """What is in ``file``. Raises CheckpointError if it is no file, or too large to be one of these; OSError."""
    try:
        return read_file(file, MOST_BYTES)
    except ValueError as error:
        raise damaged(file, str(error)) from error


def read_json(file: Path, kind: Callable[..., _T]) -> tuple[bytes, _T]:
    """What is in ``file``, and what it stands for. Raises CheckpointError unless that is a ``kind``; OSError."""
    data = read_bytes(file)
    return data, parse_json(file, data, kind)


def parse_json(file: Path, data: bytes, kind: Callable[..., _T]) -> _T:
    """What ``data``, that of ``file``, stands for. Raises CheckpointError unless that is a ``kind``."""
    try:
        return parse_file(data, kind)
    except ValueError as error:
        raise damaged(file, str(error)) from error
