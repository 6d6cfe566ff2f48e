"""Parses what a data loader yields on the edge into the arguments of the head and the target."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ldt._torch_private import pytree
from ldt.runtime.common.lru import LruCache
from ldt.runtime.common.redact import InputTypeError, InputValueError
from ldt.runtime.common.tensor_spec import TensorSpec

__all__ = ["Microbatch", "Signatures", "parse_microbatches"]

# Types whose values compare by ==. Others may be mutable, and their repr may be shortened.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


@dataclass(frozen=True)
class Microbatch:
    """``(inputs, target)``. Inputs: a tensor, a tuple (positional arguments of the head) or a dict (keywords)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any

    @classmethod
    def of(cls, pair: Any, index: int) -> Microbatch:
        """Raises TypeError if ``pair`` is no pair, or the inputs have an unsupported type."""
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            size = f" of {len(pair)} entries" if isinstance(pair, (tuple, list)) else ""
            raise InputTypeError(
                f"microbatch {index} must be a pair (inputs, target), got {type(pair).__name__}{size}; "
                "without targets, as in eval, pass (inputs, None)"
            )
        inputs, target = pair
        if isinstance(inputs, torch.Tensor):
            return cls((inputs,), {}, target)
        if isinstance(inputs, (tuple, list)):
            return cls(tuple(inputs), {}, target)
        if isinstance(inputs, Mapping):
            return cls((), {str(name): value for name, value in inputs.items()}, target)
        raise InputTypeError(
            f"the inputs of microbatch {index} must be a tensor, a tuple or a dict, got {type(inputs).__name__}"
        )

    @property
    def signature(self) -> object:
        """Structure, tensor specs and plain values of the inputs; equal signatures mean equal output specs of the head.

        Stays on the edge. With a value of another type among the inputs, it equals no other signature.
        """
        leaves, structure = pytree.tree_flatten((self.args, self.kwargs))
        return str(structure), tuple(map(_signature_of, leaves))

    def is_same(self, other: Microbatch) -> bool:
        """Whether both consist of the same objects."""
        leaves, others = (pytree.tree_leaves((m.args, m.kwargs, m.target)) for m in (self, other))
        return len(leaves) == len(others) and all(map(operator.is_, leaves, others))

    def versions(self) -> list[object]:
        """Return how often each tensor was modified in place; inference tensors have no such counter."""
        leaves = pytree.tree_leaves((self.args, self.kwargs, self.target))
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference())
        return [tensor._version for tensor in tensors]


class Signatures:
    """Numbers signatures, which themselves stay on the edge; the 4096 most recent keep their number."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._numbers: LruCache[int] = LruCache(4096)

    def number(self, microbatch: Microbatch) -> int:
        return self._numbers.get(microbatch.signature, lambda: next(self._next))


def _signature_of(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        return TensorSpec.of(leaf)
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else object()


def parse_microbatches(microbatches: Any) -> list[Microbatch]:
    """Parse a list of (inputs, target) pairs, or of microbatches with positional arguments and keywords.

    Raises TypeError or ValueError naming the microbatch.
    """
    if microbatches is None:
        raise InputValueError("the edge needs microbatches: pass a list of (inputs, target) pairs")
    if isinstance(microbatches, (torch.Tensor, Mapping, str)) or not isinstance(microbatches, Iterable):
        raise InputTypeError(
            f"microbatches must be a list of (inputs, target) pairs, got {type(microbatches).__name__}"
        )
    parsed = [
        pair if isinstance(pair, Microbatch) else Microbatch.of(pair, index)
        for index, pair in enumerate(microbatches)
    ]
    if not parsed:
        raise InputValueError("the list of microbatches is empty: a step needs at least one")
    return parsed
