"""Reads files of plans, timelines and costs, with limits on their size."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from ldt.errors import PlanError
from ldt.topology import Topology
from ldt.untrusted import decompressed, parse_file, read_file

__all__ = ["check_size", "check_text", "load", "read_json"]

_MAX_BYTES = 16 << 20
_MAX_FORWARDS = 1_000_000  # of a step, over all replicas
_FORWARDS_OF_ANY_TEXT = 10_000  # that the header of any text may declare, however short the text
_T = TypeVar("_T")


def load(path: str | os.PathLike[str], read: Callable[[str], _T], max_bytes: int = _MAX_BYTES) -> _T:
    """Return ``read`` of the text in a file of at most ``max_bytes``, which may be compressed by gzip.

    Raises FileNotFoundError, or PlanError naming the file if it cannot be read or is of another kind.
    """
    try:
        return read(decompressed(read_file(path, max_bytes), max_bytes).decode())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PlanError(f"{os.fspath(path)} cannot be read: {error.strerror}") from error
    except ValueError as error:  # includes PlanError and UnicodeDecodeError
        raise PlanError(f"{os.fspath(path)}: {error}") from error


def read_json(text: str, kind: Callable[..., _T], what: str) -> _T:
    """Return the dataclass ``kind`` in the JSON ``text``. Raises PlanError for anything else; ``what`` names it."""
    try:
        check_text(text)
        return parse_file(text, kind)
    except ValueError as error:
        raise PlanError(f"this is not {what}: {error}") from error


def check_text(text: str) -> None:
    """Raise PlanError if ``text`` is not a str or is too long."""
    if not isinstance(text, str):
        raise PlanError(f"expected a str, got {type(text).__name__}")
    if len(text) > _MAX_BYTES:
        raise PlanError(f"expected a text of at most {_MAX_BYTES} characters, got {len(text)}")


def check_size(topology: Topology, num_microbatches: int, characters: int) -> None:
    """Raise PlanError if the header of a text of ``characters`` declares more actions than the text can hold."""
    forwards = topology.dp * topology.num_chunks * num_microbatches
    limit = min(_MAX_FORWARDS, max(characters // len("0F0"), _FORWARDS_OF_ANY_TEXT))
    if forwards > limit:
        raise PlanError(
            f"expected a plan of at most {limit} forwards, because the text has {characters} characters: "
            f"dp={topology.dp}, {topology.num_chunks} chunks and {num_microbatches} microbatches make {forwards}"
        )
