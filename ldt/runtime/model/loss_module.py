"""Finds the parameters and buffers of a loss function: modules that it is, holds or refers to."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from types import CodeType, FunctionType, MethodType
from typing import Any, Union

import torch
from torch import nn

from ldt._torch_private import tree_leaves
from ldt.runtime.common.redact import InputValueError
from ldt.runtime.model.data_parallel import is_fully_sharded, unwrapped

__all__ = ["check_trained_leaves", "loss_module"]

_Trained = Union[nn.Module, nn.Parameter]  # noqa: UP007 (evaluated)
_MAX_DEPTH = 6  # of nested containers and functions
_ATTRIBUTE_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_VARIABLE_LOADS = (
    "LOAD_FAST",
    "STORE_FAST_LOAD_FAST",
    "LOAD_DEREF",
    "LOAD_CLASSDEREF",
    "LOAD_GLOBAL",
    "LOAD_NAME",
)
_LOADS = (*_VARIABLE_LOADS, *_ATTRIBUTE_LOADS)


def loss_module(loss_fn: Callable[..., Any] | None) -> nn.Module | None:
    """Return a module with everything that ``loss_fn`` trains, ``loss_fn`` itself if it is one; None if nothing.

    Searches partials, containers, and everything that the code of functions and methods reads: attributes of their
    object, defaults, closures and globals. If code reads only some attributes of a module, only those count:
    ``model.config.vocab_size`` trains nothing. Raises ValueError for a module in ``fully_shard``.
    """
    found = dict(_find_trained(loss_fn, "", _MAX_DEPTH, set()))
    held = found.get("")
    if not isinstance(held, nn.Module):
        held = nn.Module()
        for path, value in found.items():
            name = path.replace(".", "_") or "parameter"
            held.add_module(name, value) if isinstance(value, nn.Module) else setattr(held, name, value)
    if is_fully_sharded(held):
        raise InputValueError(
            "loss_fn has a module in fully_shard, which is for chunks only: do not shard it"
        )
    return held if any(True for _ in chain(held.parameters(), held.buffers())) else None


def check_trained_leaves(loss: torch.Tensor, output: Any, known: Container[int]) -> None:
    """Raise ValueError for a trained leaf between ``output`` and ``loss`` whose ``id`` is not ``known``."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    nodes, seen = [loss.grad_fn], {id(tensor.grad_fn) for tensor in tensors}
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        nodes += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad node
        if leaf is not None and leaf.numel() and id(leaf) not in known:
            raise InputValueError(
                f"loss_fn uses a tensor of shape {list(leaf.shape)} that requires a gradient but was not found in "
                "loss_fn or the chunks, so its gradient would not be divided or averaged: make it a parameter of an "
                "nn.Module, and pass that module as loss_fn"
            )


def _find_trained(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, _Trained]]:
    """Yield the outermost modules and parameters that ``value`` holds, with the attribute path to each."""
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield path, unwrapped(value)
    elif isinstance(value, nn.Parameter):
        yield path, value
    else:
        for name, part in _children(value):
            yield from _find_trained(part, f"{path}.{name}".strip("."), depth - 1, seen)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case functools.partial():
            yield "", value.func
            named = [(str(index), part) for index, part in enumerate(value.args)]
            yield from _read_arguments(value.func, [*named, *value.keywords.items()])
        case MethodType() if isinstance(value.__self__, nn.Module) and value.__name__ == "forward":
            yield "", value.__self__
        case MethodType():
            yield from _read_by_method(value.__self__, value.__func__)
        case FunctionType():
            yield from _read_by_function(value)
        case Mapping():
            yield from ((str(key), part) for key, part in value.items())
        case list() | tuple():
            yield from ((str(index), part) for index, part in enumerate(value))
        case _ if not isinstance(value, (type, torch.Tensor)):
            yield from _read_by_method(value, inspect.getattr_static(type(value), "__call__", None))


def _read_by_method(owner: Any, function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of ``owner`` that its method ``function`` reads, directly or by other methods."""
    if not isinstance(function, FunctionType):  # not callable, or a class written in C
        return
    yield from _read_by_function(function)
    reads = _reads(function.__code__)
    for name in sorted(_names_read(function.__code__)):
        if isinstance(getattr(type(owner), name, None), property):
            yield name, MethodType(getattr(type(owner), name).fget, owner)
        elif hasattr(owner, name):
            yield from _read_parts(name, getattr(owner, name), reads.get(name))


def _read_by_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what ``function`` reads besides its arguments. Globals of torch's own functions are skipped."""
    code, reads = function.__code__, _reads(function.__code__)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield from _read_parts(name, cell.cell_contents, reads.get(name))
    yield from _read_arguments(function, (function.__kwdefaults__ or {}).items())
    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    for index, value in enumerate(defaults):
        yield from _read_parts(f"default{index}", value, reads.get(code.co_varnames[first + index]))
    if not (function.__module__ or "").startswith("torch."):
        for name in sorted(_globals_read(code) & function.__globals__.keys()):
            yield from _read_parts(name, function.__globals__[name], reads.get(name))


def _read_arguments(function: Any, given: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield what ``function`` reads of the arguments ``given`` to it, by name or by position."""
    code = function.__code__ if isinstance(function, FunctionType) else None
    reads = {} if code is None else _reads(code)
    positional = () if code is None else code.co_varnames[: code.co_argcount]
    for name, value in given:
        by_position = name.isdecimal() and int(name) < len(positional)
        yield from _read_parts(name, value, reads.get(positional[int(name)] if by_position else name))


# -- what code reads -------------------------------------------------------------------------------------------

_Chain = tuple[str, ...]  # of attributes: ("config", "vocab_size") for ``model.config.vocab_size``


def _read_parts(name: str, value: Any, chains: set[_Chain] | None) -> Iterator[tuple[str, Any]]:
    """Yield ``value``, or if it is a module, the attributes that code reads by ``chains``; all of it if unknown."""
    ends = {path: _resolve(value, path) for path in chains or {()}} if isinstance(value, nn.Module) else {}
    if not ends or any(end is value for end in ends.values()):
        yield name, value
        return
    for attributes, end in sorted(ends.items(), key=lambda pair: pair[0]):
        path = ".".join((name, *attributes))
        yield path, end
        if not isinstance(end, (nn.Module, torch.Tensor)):
            yield path, getattr(end, "__dict__", None)


def _resolve(module: nn.Module, chain: _Chain) -> Any:
    """Return ``module.a.b``: the object of a method, and the closest module or parameter of a computed tensor."""
    trained: Any = module
    value: Any = module
    for name in chain:
        try:
            value = getattr(value, name)
        except Exception:  # user code, which may never be reached
            return trained
        value = getattr(value, "__self__", value)
        trained = value if isinstance(value, (nn.Module, nn.Parameter)) else trained
    return trained if isinstance(value, torch.Tensor) else value


def _reads(code: CodeType) -> dict[str, set[_Chain]]:
    """Return the variables and attributes that code and its inner functions load, with the attributes read of each."""
    found: dict[str, set[_Chain]] = {}
    after: _Chain = ()
    for step in reversed([step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]):
        if not step.opname.startswith(_LOADS):
            after = ()
            continue
        names = (
            step.argval if isinstance(step.argval, tuple) else (step.argval,)
        )  # some opcodes load two variables
        for name in reversed(names):
            found.setdefault(name, set()).add(after)
            after = (name, *after) if step.opname.startswith(_ATTRIBUTE_LOADS) else ()
    for part in _codes_in(code):
        for name, chains in _reads(part).items():
            found.setdefault(name, set()).update(chains)
    return found


def _names_read(code: CodeType) -> set[str]:
    return set(code.co_names).union(*map(_names_read, _codes_in(code)))


def _globals_read(code: CodeType) -> set[str]:
    own = {str(step.argval) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return own.union(*map(_globals_read, _codes_in(code)))


def _codes_in(code: CodeType) -> list[CodeType]:
    """The code of inner functions and comprehensions."""
    return [part for part in code.co_consts if isinstance(part, CodeType)]
