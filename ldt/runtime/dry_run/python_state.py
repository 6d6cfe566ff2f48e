"""Reads the state of a module outside of tensors: plain values, iterators, random generators."""

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

__all__ = ["ATOMS", "reduce_iterator", "slots_of", "state_of", "uncopyable_iterator"]

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_MAX_ENTRIES = 100  # of a nested container


def slots_of(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of ``value`` stored in ``__slots__``."""
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def state_of(value: Any) -> object:
    """Return what to compare of ``value``: the state of a generator or iterator, or the plain values of a container."""
    if isinstance(value, (torch.Tensor, FunctionType)):
        return None
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value).__module__.partition(".")[0] == "numpy":
        generator = getattr(value, "bit_generator", value)
        return value.tobytes() if hasattr(value, "tobytes") else repr(generator.__getstate__())
    if isinstance(value, (list, collections.deque)):
        return [_comparable(entry) for entry in value]
    if isinstance(value, (set, bytearray)):
        return len(value), {entry for entry in value if type(entry) in ATOMS}
    kept = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    names = kept.items() if isinstance(kept, dict) else ()
    atoms = [
        {name: found for name, entry in entries if (found := _comparable(entry)) is not None or entry is None}
        for entries in (names, slots_of(value))
    ]
    return len(value) if isinstance(value, dict) else None, atoms, _position(value)


def _comparable(value: Any, depth: int = 3) -> object:
    """Return ``value`` if it is a scalar, a string or a small container of these; otherwise None."""
    if type(value) in ATOMS or isinstance(value, Enum):
        return value
    if not depth or not isinstance(value, (tuple, list, frozenset, dict)) or len(value) > _MAX_ENTRIES:
        return None
    if isinstance(value, dict):
        return {name: _comparable(entry, depth - 1) for name, entry in value.items() if type(name) in ATOMS}
    if isinstance(value, frozenset):
        return len(value), {entry for entry in value if type(entry) in ATOMS}
    return [_comparable(entry, depth - 1) for entry in value]


def reduce_iterator(value: Any) -> Any:
    """Return how to copy a built-in iterator, as ``__reduce__`` does. Raises TypeError if it cannot be copied."""
    if isinstance(value, itertools.count):  # newer versions of Python cannot pickle it
        return itertools.count, ast.literal_eval(f"({repr(value).partition('(')[2][:-1]},)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return value.__reduce__()


def _position(value: Any) -> object:
    """Return the position of an iterator for comparison; None if it cannot be read."""
    if isinstance(value, tuple):
        return [_position(part) for part in value]
    if isinstance(value, list):
        return len(value)
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        with suppress(TypeError):
            return [_position(part) for part in reduce_iterator(value)[1:]]
    return value if type(value) in ATOMS else None


def uncopyable_iterator(kind: str) -> Iterator[Any]:
    """Return a replacement for an iterator that cannot be copied. Its first ``next`` raises LdtError."""
    raise LdtError(
        f"its forward advances a {kind}, which a dry run cannot rewind: keep the sequence and an index instead, or "
        "declare the result: give the module a method output_spec(*input_specs) that returns one "
        "ldt.runtime.TensorSpec per output"
    )
    yield
