"""Finds what custom functions and hooks change in a backward, besides the gradients that they return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from ldt.errors import LdtError
from ldt.runtime.model.module_state import parts_of

__all__ = ["FunctionWatch", "SecondPart"]

_Take = Callable[[], Sequence[torch.Tensor]]
Start = tuple[GradientEdge, torch.Tensor]
SecondPart = Callable[[], AbstractContextManager[None]]


class FunctionWatch:
    """Watches what of a chunk runs in the first part of a split backward, and would in the second.

    A function that changes the gradients of its own parameters, as fused weight gradients do, runs in the first part
    alone: what it returned is kept for the second. Anything else of ``module`` that is changed is an error, but for
    buffers that hooks change in one part only. All its parameters and buffers are looked at before and after each
    first part.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._contents = True  # the first time that functions are looked at, too
        self._accumulate: set[type] = set()  # functions that do, as was seen

    def begin(self, functions: bool = True) -> PartWatch:
        """For one first part, in which custom ``functions`` run."""
        watch = PartWatch(self._module, self._accumulate, self._contents and functions)
        self._contents = self._contents and not functions
        return watch


class PartWatch:
    """Of one first part. ``kept`` has by node what a function returned for edges that the first part leaves out."""

    def __init__(self, module: nn.Module, accumulate: set[type], contents: bool) -> None:
        self._module = module
        self._accumulate = accumulate
        self._contents = contents
        self._own: set[int] = set()  # parameters that functions changed, and that is all right
        kept = [(part._parameters, part._buffers) for part in parts_of(module)]
        self._all = _Look(
            lambda: [t for kinds in kept for kind in kinds for t in kind.values() if t is not None], contents
        )
        self.kept: dict[Node, list[Start]] = {}

    def around(self, node: Node, leaves: Iterable[Node], between: set[Node], hooks: ExitStack) -> None:
        """Look at the parameters ``leaves`` before and after ``node`` runs, until ``hooks`` end."""
        own = [leaf.variable for leaf in leaves]  # type: ignore[attr-defined]
        looks: list[_Look] = []

        def before(_: object) -> None:
            if type(node) not in self._accumulate:
                looks.append(_Look(lambda: own, self._contents))

        def after(grads: Any, _: object) -> None:
            if type(node) not in self._accumulate and not any(looks.pop().changes()):
                return
            self._accumulate.add(type(node))
            self._own.update(map(id, own))
            self.kept[node] = [
                (GradientEdge(child, index), grad)
                for (child, index), grad in zip(node.next_functions, grads, strict=True)
                if child is not None and child not in between and grad is not None
            ]

        hooks.enter_context(node.register_prehook(before))
        hooks.enter_context(node.register_hook(after))

    def check(self, functions: Collection[str]) -> SecondPart:
        """Raise LdtError if something else was changed, by one of these ``functions`` or by hooks.

        Buffers that hooks change are left to what is returned, to be entered around the second part.
        """
        moved = []
        for tensor, part in self._all.changes(self._own):
            buffers = (name for name, other in self._module.named_buffers() if other is tensor)
            name = next(buffers, None)
            if functions or name is None or part:
                parameters = (name for name, other in self._module.named_parameters() if other is tensor)
                raise _cannot(name or next(parameters, "a tensor"), part, functions)
            moved.append(name)
        return partial(_changes_none, self._module, moved)


@contextmanager
def _changes_none(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Raise LdtError if what runs meanwhile changes one of these buffers."""
    before = _buffers(module, names)
    yield
    after = _buffers(module, names)
    for name, seen in before.items():
        if after.get(name) != seen:
            raise _cannot(name, "", ())


def _buffers(module: nn.Module, names: Collection[str]) -> dict[str, tuple[int, object]]:
    found = module.named_buffers() if names else ()
    return {name: (id(tensor), tensor._version) for name, tensor in found if name in names}


def _cannot(name: str, part: str, functions: Collection[str]) -> LdtError:
    listed = ", ".join(sorted(set(functions)))
    what = f"custom functions ({listed})" if functions else "hooks of tensors and checkpoints"
    instead = "Let the function return that gradient" if functions else "Do that in a hook of a parameter"
    return LdtError(
        f"its backward cannot be split: it changes {name}{part} itself, and would do so again in the second part, as "
        f"{what} that lead to inputs and parameters run in both. {instead}, or take a plan without split backward"
    )


class _Look:
    """At tensors, at their ``grad`` and at tensors that are their attributes, such as ``main_grad``.

    A change shows in the object or in its version. With ``contents`` also in the sum of its elements, as code that
    goes by ``data``, or does not go by torch at all, leaves the version alone; that waits for the device.
    """

    def __init__(self, take: _Take, contents: bool) -> None:
        self._take = take
        self._contents = contents
        self._tensors = take()  # so that no other tensor gets their ids
        self._before = self._columns(self._tensors)

    def changes(self, apart_from: Collection[int] = ()) -> Iterator[tuple[torch.Tensor, str]]:
        """The tensors that are not as they were, but for those of these ids, and what of them."""
        tensors = self._take()
        after = self._columns(tensors)
        if after == self._before:
            return
        rows = dict(zip(self._before[0], zip(*self._before[1:], strict=True), strict=True))
        for tensor, *row in zip(tensors, *after[1:], strict=True):
            one, other = _by_part(rows.get(id(tensor), ())), _by_part(row)
            differing = [part for part in {**one, **other} if one.get(part) != other.get(part)]
            if differing and id(tensor) not in apart_from:
                yield tensor, differing[0]

    def _columns(self, tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
        """What there is to see of them. By columns, as that takes the least time."""
        grads = [tensor.grad if tensor.is_leaf else None for tensor in tensors]
        dicts = [tensor.__dict__ for tensor in tensors]
        attributes = [self._attributes(held) if held else None for held in dicts]
        return [_ids(tensors), self._contents_of(tensors), _ids(grads), self._contents_of(grads), attributes]

    def _attributes(self, held: dict[str, object]) -> dict[str, object]:
        tensors = {key: value for key, value in held.items() if isinstance(value, torch.Tensor)}
        values = list(tensors.values())
        return dict(zip(tensors, zip(_ids(values), self._contents_of(values), strict=True), strict=True))

    def _contents_of(self, tensors: Sequence[torch.Tensor | None]) -> list[object]:
        if not self._contents:
            with suppress(RuntimeError):  # one of inference mode has no version
                return [None if tensor is None else tensor._version for tensor in tensors]
        return [None if tensor is None else self._content_of(tensor) for tensor in tensors]

    def _content_of(self, tensor: torch.Tensor) -> object:
        version = None if tensor.is_inference() else tensor._version
        return (version, _sum(tensor)) if self._contents else version


def _ids(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return list(map(id, tensors))


def _by_part(row: Sequence[Any]) -> dict[str, object]:
    """By its name what a row of the columns but the first says, nothing if it is empty."""
    if not row:
        return {}
    content, grad_id, of_grad, attributes = row
    named = {f".{key}": seen for key, seen in (attributes or {}).items()}
    return {"": content, ".grad": (grad_id, of_grad), **named}


@torch.no_grad()
def _sum(tensor: torch.Tensor) -> object:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    if local.layout is not torch.strided or not local.is_floating_point():
        return None
    return repr(local.sum(dtype=torch.float64).item())  # as text, in which NaN equals itself
