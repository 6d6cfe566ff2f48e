"""Detects side effects of custom functions and hooks that would run twice in a split backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from ldt._torch_private import local_tensor
from ldt.errors import LdtError
from ldt.runtime.model.module_state import all_submodules

__all__ = ["FunctionWatch", "SecondPart"]

_GetTensors = Callable[[], Sequence[torch.Tensor]]
Start = tuple[GradientEdge, torch.Tensor]
SecondPart = Callable[[], AbstractContextManager[None]]


class FunctionWatch:
    """Watches the functions and hooks of a chunk that run in both parts of a split backward.

    A function that changes the gradients of its own parameters, as fused weight gradients do, runs in the first part
    only; its results are kept for the second. Any other change to the parameters or buffers of ``module`` is an error,
    except to buffers that hooks change in one part only. All parameters and buffers are compared before and after each
    first part. With ``once`` all functions run in the first part only, as those that delay gradients of weights must.
    """

    def __init__(self, module: nn.Module, once: bool = False) -> None:
        self._module = module
        self._once = once
        self._contents = True  # compare contents until custom functions have been watched once
        self._accumulate: set[type] = set()  # functions known to accumulate into gradients themselves

    def begin(self, functions: bool = True) -> PartWatch:
        """Start watching one first part. ``functions``: whether custom functions run in it."""
        watch = PartWatch(self._module, self._accumulate, self._contents and functions, self._once)
        self._contents = self._contents and not functions
        return watch


class PartWatch:
    """Watches one first part. ``kept`` has, by node, what a function returned for edges outside the first part."""

    def __init__(self, module: nn.Module, accumulate: set[type], contents: bool, once: bool = False) -> None:
        self._module = module
        self._once = once
        self._accumulate = accumulate
        self._contents = contents
        self._allowed: set[int] = set()  # parameters that functions may change: their own
        owned = [(part._parameters, part._buffers) for part in all_submodules(module)]
        self._all = _Snapshot(
            lambda: [t for kinds in owned for kind in kinds for t in kind.values() if t is not None], contents
        )
        self.kept: dict[Node, list[Start]] = {}

    def watch_node(self, node: Node, leaves: Iterable[Node], between: set[Node], hooks: ExitStack) -> None:
        """Compare the parameters ``leaves`` before and after ``node`` runs, until ``hooks`` is closed."""
        own = [leaf.variable for leaf in leaves]  # type: ignore[attr-defined]
        snapshots: list[_Snapshot] = []

        def before(_: object) -> None:
            if type(node) not in self._accumulate:
                snapshots.append(_Snapshot(lambda: own, self._contents))

        def after(grads: Any, _: object) -> None:
            if type(node) not in self._accumulate:
                if any(snapshots.pop().changes()):
                    self._accumulate.add(type(node))
                elif not self._once:
                    return
            self._allowed.update(map(id, own))
            self.kept[node] = [
                (GradientEdge(child, index), grad)
                for (child, index), grad in zip(node.next_functions, grads, strict=True)
                if child is not None and child not in between and grad is not None
            ]

        hooks.enter_context(node.register_prehook(before))
        hooks.enter_context(node.register_hook(after))

    def check(self, functions: Collection[str]) -> SecondPart:
        """Raise LdtError if one of these ``functions`` or a hook changed anything else.

        Returns a context manager for the second part, which raises if a buffer that hooks changed changes again.
        """
        changed = []
        for tensor, part in self._all.changes(self._allowed):
            buffers = (name for name, other in self._module.named_buffers() if other is tensor)
            name = next(buffers, None)
            if functions or name is None or part:
                parameters = (name for name, other in self._module.named_parameters() if other is tensor)
                raise _cannot_split(name or next(parameters, "a tensor"), part, functions)
            changed.append(name)
        return partial(_unchanged, self._module, changed)


@contextmanager
def _unchanged(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Raise LdtError if one of these buffers changes within the context."""
    before = _buffers(module, names)
    yield
    after = _buffers(module, names)
    for name, seen in before.items():
        if after.get(name) != seen:
            raise _cannot_split(name, "", ())


def _buffers(module: nn.Module, names: Collection[str]) -> dict[str, tuple[int, object]]:
    found = module.named_buffers() if names else ()
    return {name: (id(tensor), tensor._version) for name, tensor in found if name in names}


def _cannot_split(name: str, part: str, functions: Collection[str]) -> LdtError:
    listed = ", ".join(sorted(set(functions)))
    what = f"custom functions ({listed})" if functions else "hooks of tensors and checkpoints"
    instead = "Let the function return that gradient" if functions else "Do that in a hook of a parameter"
    return LdtError(
        f"its backward cannot be split: it changes {name}{part} itself, and would do so again in the second part: "
        f"{what} that lead to inputs and parameters run in both. {instead}, or use a plan without split backward"
    )


class _Snapshot:
    """The state of tensors, of their ``grad`` and of their tensor attributes, such as ``main_grad``.

    A change shows as another object or another version. With ``contents``, sums of elements are compared too, because
    writes through ``data`` or outside torch do not change the version; that waits for the device.
    """

    def __init__(self, get_tensors: _GetTensors, contents: bool) -> None:
        self._get_tensors = get_tensors
        self._contents = contents
        self._tensors = get_tensors()  # kept alive so that no other tensor gets their ids
        self._before = self._columns(self._tensors)

    def changes(self, exclude: Collection[int] = ()) -> Iterator[tuple[torch.Tensor, str]]:
        """The tensors that have changed, and which part of each. Skips those whose id is in ``exclude``."""
        tensors = self._get_tensors()
        after = self._columns(tensors)
        if after == self._before:
            return
        rows = dict(zip(self._before[0], zip(*self._before[1:], strict=True), strict=True))
        for tensor, *row in zip(tensors, *after[1:], strict=True):
            old, new = _by_part(rows.get(id(tensor), ())), _by_part(row)
            differing = [part for part in {**old, **new} if old.get(part) != new.get(part)]
            if differing and id(tensor) not in exclude:
                yield tensor, differing[0]

    def _columns(self, tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
        """Their state, column by column, which is fastest."""
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
            with suppress(RuntimeError):  # inference tensors have no version
                return [None if tensor is None else tensor._version for tensor in tensors]
        return [None if tensor is None else self._content_of(tensor) for tensor in tensors]

    def _content_of(self, tensor: torch.Tensor) -> object:
        version = None if tensor.is_inference() else tensor._version
        return (version, _sum(tensor)) if self._contents else version


def _ids(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return list(map(id, tensors))


def _by_part(row: Sequence[Any]) -> dict[str, object]:
    """The state in a row (all columns but the ids) by the name of the part. Empty for an empty row."""
    if not row:
        return {}
    content, grad_id, grad_content, attributes = row
    named = {f".{key}": seen for key, seen in (attributes or {}).items()}
    return {"": content, ".grad": (grad_id, grad_content), **named}


@torch.no_grad()
def _sum(tensor: torch.Tensor) -> object:
    local = local_tensor(tensor)
    if local.layout is not torch.strided or not local.is_floating_point():
        return None
    return repr(local.sum(dtype=torch.float64).item())  # text, because NaN does not equal itself
