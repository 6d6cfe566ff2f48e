"""Finds what custom functions change in their backward, besides the gradients that they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from ldt.errors import LdtError

__all__ = ["FunctionWatch"]

_Named = Iterable[tuple[str, torch.Tensor]]
Start = tuple[GradientEdge, torch.Tensor]


class FunctionWatch:
    """Watches custom functions of a chunk that run in the first part of a split backward, and would in the second.

    A function that changes the gradients of its own parameters, as fused weight gradients do, runs in the first part
    alone: what it returned is kept for the second. Anything else that is changed is an error.
    ``named`` gives all parameters and buffers.
    """

    def __init__(self, named: Callable[[], _Named]) -> None:
        self._named = named
        self._contents = True  # the first time they are looked at, too
        self._accumulate: set[type] = set()  # functions that do, as was seen

    def begin(self) -> PartWatch:
        """For one first part."""
        watch = PartWatch(self._named, self._accumulate, self._contents)
        self._contents = False
        return watch


class PartWatch:
    """Of one first part. ``kept`` has by node what a function returned for edges that the first part leaves out."""

    def __init__(self, named: Callable[[], _Named], accumulate: set[type], contents: bool) -> None:
        self._accumulate = accumulate
        self._contents = contents
        self._own: set[int] = set()  # parameters that functions changed, and that is all right
        self._all = _Look(named, contents)
        self.kept: dict[Node, list[Start]] = {}

    def around(self, node: Node, leaves: Iterable[Node], between: set[Node], hooks: ExitStack) -> None:
        """Look at the parameters ``leaves`` before and after ``node`` runs, until ``hooks`` end."""
        own = [(str(index), leaf.variable) for index, leaf in enumerate(leaves)]  # type: ignore[attr-defined]
        looks: list[_Look] = []

        def before(_: object) -> None:
            looks.append(_Look(lambda: own, self._contents))

        def after(grads: Any, _: object) -> None:
            if type(node) not in self._accumulate and looks.pop().changed() is None:
                return
            self._accumulate.add(type(node))
            self._own |= {id(parameter) for _, parameter in own}
            self.kept[node] = [
                (GradientEdge(child, index), grad)
                for (child, index), grad in zip(node.next_functions, grads, strict=True)
                if child is not None and child not in between and grad is not None
            ]

        hooks.enter_context(node.register_prehook(before))
        hooks.enter_context(node.register_hook(after))

    def check(self, names: Iterable[str]) -> None:
        """Raise LdtError if something else was changed, ``names`` being those of the functions."""
        changed = self._all.changed(self._own)
        if changed is not None:
            raise LdtError(
                f"its backward cannot be split: it changes {changed} itself, and would do so again in the second part, "
                "as custom functions that lead to inputs and parameters run in both "
                f"({', '.join(sorted(set(names)))}). Let the function return that gradient, or take a plan without "
                "split backward"
            )


class _Look:
    """At tensors, at their ``grad`` and at tensors that are their attributes, such as ``main_grad``.

    A change shows in the object or in its version. With ``contents`` also in the sum of its elements, as code that
    goes by ``data``, or does not go by torch at all, leaves the version alone; that waits for the device.
    """

    def __init__(self, named: Callable[[], _Named], contents: bool) -> None:
        self._named = named
        self._contents = contents
        self._before = self._seen(())

    def changed(self, apart_from: Iterable[int] = ()) -> str | None:
        """What is not as it was, by its name, but for tensors of these ids; None if all is."""
        for name, after in self._seen(apart_from).items():
            before = self._before.get(name, {})
            for part in {**before, **after}:
                if before.get(part) != after.get(part):
                    return name + part
        return None

    def _seen(self, apart_from: Iterable[int]) -> dict[str, dict[str, object]]:
        pairs = ((name, tensor) for name, tensor in self._named() if id(tensor) not in apart_from)
        return {name: dict(self._parts(tensor)) for name, tensor in pairs}

    def _parts(self, tensor: torch.Tensor) -> Iterator[tuple[str, object]]:
        yield "", self._look(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            yield ".grad", self._look(tensor.grad)
        for key, value in vars(tensor).items():
            if isinstance(value, torch.Tensor):
                yield f".{key}", self._look(value)

    def _look(self, tensor: torch.Tensor) -> object:
        seen: tuple[Any, ...] = (id(tensor), None if tensor.is_inference() else tensor._version)
        return (*seen, _sum(tensor)) if self._contents else seen


@torch.no_grad()
def _sum(tensor: torch.Tensor) -> object:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    if local.layout is not torch.strided or not local.is_floating_point():
        return None
    return repr(local.sum(dtype=torch.float64).item())  # as text, in which NaN equals itself
