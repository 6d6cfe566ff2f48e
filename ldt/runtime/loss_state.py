"""The parameters and buffers of a loss function: modules that it is, holds or refers to."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from types import CodeType, FunctionType, MethodType
from typing import Any, Union

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ldt.runtime.data_parallel import is_fully_sharded, unwrapped
from ldt.runtime.disclosure import InputValueError

__all__ = ["loss_module", "refuse_unknown"]

_Trained = Union[nn.Module, nn.Parameter]  # noqa: UP007 (evaluated)
_DEPTH = 6  # of things within things


def loss_module(loss_fn: Callable[..., Any] | None) -> nn.Module | None:
    """A module that has all that ``loss_fn`` trains, itself where it is one; None if there is nothing.

    Modules and parameters are looked for in partials and containers, and in what the code of functions and methods
    refers to: attributes of their object, defaults, variables of the functions around them, globals.
    Raises ValueError for a part in ``fully_shard``.
    """
    found = dict(_found(loss_fn, "", _DEPTH, set()))
    held = found.get("")
    if not isinstance(held, nn.Module):
        held = nn.Module()
        for path, thing in found.items():
            name = path.replace(".", "_") or "parameter"
            held.add_module(name, thing) if isinstance(thing, nn.Module) else setattr(held, name, thing)
    if is_fully_sharded(held):
        raise InputValueError("a part of loss_fn is in fully_shard, which is for chunks: leave it whole")
    return held if any(True for _ in chain(held.parameters(), held.buffers())) else None


def refuse_unknown(loss: torch.Tensor, output: Any, known: Container[int]) -> None:
    """Raise ValueError for what is trained between ``output`` and its ``loss`` and not ``known``, by ``id``."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    nodes, seen = [loss.grad_fn], {id(tensor.grad_fn) for tensor in tensors}
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        nodes += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)  # of a node that accumulates
        if leaf is not None and leaf.numel() and id(leaf) not in known:
            raise InputValueError(
                f"loss_fn computes with a tensor of shape {list(leaf.shape)} that requires a gradient and that this "
                "pipeline does not find, so that its gradient would not be divided or averaged as others are: make it "
                "a parameter of an nn.Module, and give that as loss_fn"
            )


def _found(thing: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, _Trained]]:
    """The outermost modules and parameters that ``thing`` holds, by how they are got at."""
    if depth == 0 or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, nn.Module):
        yield path, unwrapped(thing)
    elif isinstance(thing, nn.Parameter):
        yield path, thing
    else:
        for name, part in _parts(thing):
            yield from _found(part, f"{path}.{name}".strip("."), depth - 1, seen)


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    match thing:
        case functools.partial():
            yield "", thing.func
            yield from ((str(index), part) for index, part in enumerate(thing.args))
            yield from thing.keywords.items()
        case MethodType() if isinstance(thing.__self__, nn.Module) and thing.__name__ == "forward":
            yield "", thing.__self__
        case MethodType():
            yield from _of_method(thing.__self__, thing.__func__)
        case FunctionType():
            yield from _of_function(thing)
        case Mapping():
            yield from ((str(key), part) for key, part in thing.items())
        case list() | tuple():
            yield from ((str(index), part) for index, part in enumerate(thing))
        case _ if not isinstance(thing, (type, torch.Tensor)):
            yield from _of_method(thing, inspect.getattr_static(type(thing), "__call__", None))


def _of_method(owner: Any, function: Any) -> Iterator[tuple[str, Any]]:
    """What the code reads of ``owner``, also by its other methods."""
    if not isinstance(function, FunctionType):  # of nothing that is called, or of a class written in C
        return
    yield from _of_function(function)
    for name in sorted(_names_read(function.__code__)):
        if isinstance(getattr(type(owner), name, None), property):
            yield name, MethodType(getattr(type(owner), name).fget, owner)
        elif hasattr(owner, name):
            yield name, getattr(owner, name)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What its code reads that is not given to it. What torch's own functions read holds nothing of a job's."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    yield from (function.__kwdefaults__ or {}).items()
    yield from ((f"default{index}", value) for index, value in enumerate(function.__defaults__ or ()))
    if not (function.__module__ or "").startswith("torch."):
        read = sorted(_globals_read(code) & function.__globals__.keys())
        yield from ((name, function.__globals__[name]) for name in read)


def _names_read(code: CodeType) -> set[str]:
    return set(code.co_names).union(*map(_names_read, _codes_in(code)))


def _globals_read(code: CodeType) -> set[str]:
    mine = {str(step.argval) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return mine.union(*map(_globals_read, _codes_in(code)))


def _codes_in(code: CodeType) -> list[CodeType]:
    """Of functions and comprehensions in it."""
    return [part for part in code.co_consts if isinstance(part, CodeType)]
