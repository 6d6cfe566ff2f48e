"""Files of this package's plans, timelines and costs: how large they may be, and how they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from ldt.errors import PlanError
from ldt.topology import Topology
from ldt.untrusted import parse_file, read_file

__all__ = ["check_size", "check_text", "load", "read_json"]

_MOST_BYTES = 16 << 20
_MOST_FORWARDS = 1_000_000  # of a step, by all replicas
_FORWARDS_OF_ANY_TEXT = 10_000  # that a text may speak of without having an action for each
_T = TypeVar("_T")


def load(path: str | os.PathLike[str], read: Callable[[str], _T]) -> _T:
    """``read`` of the text in a file. Raises PlanError naming the file if it is of another kind; FileNotFoundError."""
    try:
        return read(read_file(path, _MOST_BYTES).decode())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PlanError(f"{os.fspath(path)} cannot be read: {error.strerror}") from error
    except ValueError as error:  # PlanError is one, as is that of a text that is not UTF-8
        raise PlanError(f"{os.fspath(path)}: {error}") from error


def read_json(text: str, kind: Callable[..., _T], what: str) -> _T:
    """The dataclass ``kind`` that is in ``text``. Raises PlanError for anything else; ``what`` is its name there."""
    try:
        check_text(text)
        return parse_file(text, kind)
    except ValueError as error:
        raise PlanError(f"this is not {what}: {error}") from error


def check_text(text: str) -> None:
    """Raise PlanError for what is no text, or longer than any that this package reads."""
    if not isinstance(text, str):
        raise PlanError(f"expected a text, got {type(text).__name__}")
    if len(text) > _MOST_BYTES:
        raise PlanError(f"expected a text of at most {_MOST_BYTES} characters, got {len(text)}")


def check_size(topology: Topology, num_microbatches: int, characters: int) -> None:
    """Raise PlanError if a text of so many ``characters`` speaks of more actions than it, or any, can have."""
    forwards = topology.dp * topology.num_chunks * num_microbatches
    most = min(_MOST_FORWARDS, max(characters // len("0F0"), _FORWARDS_OF_ANY_TEXT))
    if forwards > most:
        raise PlanError(
            f"expected a plan of at most {most} forwards, as the text has {characters} characters: dp={topology.dp}, "
            f"{topology.num_chunks} chunks and {num_microbatches} microbatches make {forwards}"
        )
