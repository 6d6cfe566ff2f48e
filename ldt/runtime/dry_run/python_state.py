"""State of a module that is no tensor: numbers and words that it keeps, where iterators and random generators stand."""

from __future__ import annotations

import ast
import collections
import itertools
import random
import warnings
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from types import FunctionType
from typing import Any

import torch

from ldt.errors import LdtError

__all__ = ["ATOMS", "pickled", "refused", "slots_of", "state_of"]

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_MOST_ENTRIES = 100  # of a container within another


def slots_of(value: object) -> Iterator[tuple[str, Any]]:
    """The attributes of ``value`` that lie in ``__slots__``."""
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def state_of(value: Any) -> object:
    """Where a random generator of the host or an iterator stands, which plain values are kept; else nothing."""
    if isinstance(value, (torch.Tensor, FunctionType)):
        return None
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value).__module__.partition(".")[0] == "numpy":
        generator = getattr(value, "bit_generator", value)
        return value.tobytes() if hasattr(value, "tobytes") else repr(generator.__getstate__())
    if isinstance(value, (list, collections.deque)):
        return [_told(entry) for entry in value]
    if isinstance(value, (set, bytearray)):
        return len(value), {entry for entry in value if type(entry) in ATOMS}
    kept = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    names = kept.items() if isinstance(kept, dict) else ()
    atoms = [
        {name: told for name, entry in entries if (told := _told(entry)) is not None or entry is None}
        for entries in (names, slots_of(value))
    ]
    return len(value) if isinstance(value, dict) else None, atoms, _position(value)


def _told(value: Any, depth: int = 3) -> object:
    """``value``, if it is a number, a word, or a small container that others of its kind may replace; else None."""
    if type(value) in ATOMS or isinstance(value, Enum):
        return value
    if not depth or not isinstance(value, (tuple, list, frozenset, dict)) or len(value) > _MOST_ENTRIES:
        return None
    if isinstance(value, dict):
        return {name: _told(entry, depth - 1) for name, entry in value.items() if type(name) in ATOMS}
    if isinstance(value, frozenset):
        return len(value), {entry for entry in value if type(entry) in ATOMS}
    return [_told(entry, depth - 1) for entry in value]


def pickled(value: Any) -> Any:
    """The class of an iterator of Python's own and what to make a copy of. Raises TypeError where there is none."""
    if isinstance(value, itertools.count):  # newer versions of Python do not pickle iterators
        return itertools.count, ast.literal_eval(f"({repr(value).partition('(')[2][:-1]},)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return value.__reduce__()


def _position(value: Any) -> object:
    """Where an iterator stands, to be compared; None where that cannot be told."""
    if isinstance(value, tuple):
        return [_position(part) for part in value]
    if isinstance(value, list):
        return len(value)
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        with suppress(TypeError):
            return [_position(part) for part in pickled(value)[1:]]
    return value if type(value) in ATOMS else None


def refused(kind: str) -> Iterator[Any]:
    """In place of an iterator that has no copy. Raises LdtError when something is taken from it."""
    raise LdtError(
        f"its forward takes from a {kind}, which cannot be put back: keep what it runs over, and how far it is, or "
        "declare the result: give the module a method output_spec(*input_specs) that returns one "
        "ldt.runtime.TensorSpec per output"
    )
    yield
