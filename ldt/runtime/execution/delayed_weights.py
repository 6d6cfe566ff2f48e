"""Runs what modules delay of their backward: gradients of weights that they compute in a call of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["DelayedWeights"]

_METHODS = ("backward_weight", "backward_dw")  # without arguments; the second is Transformer Engine's
_BUILDER = "dw_builder"  # as of torch.distributed.pipelining: called behind a backward, returns what computes the rest


class DelayedWeights:
    """The delayed gradients of a chunk.

    For each microbatch it runs what ``dw_builder()`` of the chunk returned behind its backward. Without that it calls
    each of the outermost modules that have a method ``backward_weight()`` or ``backward_dw()``, in the order of the
    backwards that went before.
    """

    def __init__(self, module: nn.Module) -> None:
        builder = getattr(module, _BUILDER, None)
        self._builder: Callable[[], Any] | None = builder if callable(builder) else None
        self._methods = [] if self._builder is not None else list(_methods_of(module))
        self._built: dict[int, Any] = {}

    def __bool__(self) -> bool:
        """Whether a module delays something."""
        return bool(self._methods) or self._builder is not None

    def collect(self, microbatch: int) -> None:
        """Called behind the part of the backward that others wait for."""
        if self._builder is not None:
            self._built[microbatch] = self._builder()

    def run(self, microbatch: int) -> None:
        """Compute the gradients of the weights."""
        for method in self._methods:
            method()
        if microbatch not in self._built:
            self.collect(microbatch)
        if self._builder is not None:
            self._built.pop(microbatch)()

    def drop(self) -> None:
        """Release everything after a failure."""
        self._built.clear()


def _methods_of(module: nn.Module) -> Iterator[Callable[[], Any]]:
    """Those of the outermost modules: a method of a module calls those of its parts."""
    for name in _METHODS:
        method = getattr(module, name, None)
        if callable(method) and _takes_nothing(method):
            yield method
            return
    for child in module.children():
        yield from _methods_of(child)


def _takes_nothing(method: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:  # not a Python function
        return False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not p.empty or p.kind in variadic for p in parameters)
