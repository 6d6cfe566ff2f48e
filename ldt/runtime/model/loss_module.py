"""The parameters and buffers of a loss function: modules that it is, holds or refers to."""

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

__all__ = ["loss_module", "refuse_unknown"]

_Trained = Union[nn.Module, nn.Parameter]  # noqa: UP007 (evaluated)
_DEPTH = 6  # of things within things
_OF_OBJECTS = ("LOAD_ATTR", "LOAD_METHOD")
_OF_VARIABLES = (
    "LOAD_FAST",
    "STORE_FAST_LOAD_FAST",
    "LOAD_DEREF",
    "LOAD_CLASSDEREF",
    "LOAD_GLOBAL",
    "LOAD_NAME",
)
_LOADS = (*_OF_VARIABLES, *_OF_OBJECTS)


def loss_module(loss_fn: Callable[..., Any] | None) -> nn.Module | None:
    """A module that has all that ``loss_fn`` trains, itself where it is one; None if there is nothing.

    Modules and parameters are looked for in partials and containers, and in what the code of functions and methods
    refers to: attributes of their object, defaults, variables of the functions around them, globals. Of a module whose
    attributes alone are read there, only those count: none of it does for ``model.config.vocab_size``.
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
            named = [(str(index), part) for index, part in enumerate(thing.args)]
            yield from _arguments(thing.func, [*named, *thing.keywords.items()])
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
    reads = _reads(function.__code__)
    for name in sorted(_names_read(function.__code__)):
        if isinstance(getattr(type(owner), name, None), property):
            yield name, MethodType(getattr(type(owner), name).fget, owner)
        elif hasattr(owner, name):
            yield from _used(name, getattr(owner, name), reads.get(name))


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What its code reads that is not given to it. What torch's own functions read holds nothing of a job's."""
    code, reads = function.__code__, _reads(function.__code__)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield from _used(name, cell.cell_contents, reads.get(name))
    yield from _arguments(function, (function.__kwdefaults__ or {}).items())
    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    for index, value in enumerate(defaults):
        yield from _used(f"default{index}", value, reads.get(code.co_varnames[first + index]))
    if not (function.__module__ or "").startswith("torch."):
        for name in sorted(_globals_read(code) & function.__globals__.keys()):
            yield from _used(name, function.__globals__[name], reads.get(name))


def _arguments(function: Any, given: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """What ``function`` reads of what it is ``given``, by name or by place."""
    code = function.__code__ if isinstance(function, FunctionType) else None
    reads = {} if code is None else _reads(code)
    places = () if code is None else code.co_varnames[: code.co_argcount]
    for name, value in given:
        by_place = name.isdecimal() and int(name) < len(places)
        yield from _used(name, value, reads.get(places[int(name)] if by_place else name))


# -- what code reads -------------------------------------------------------------------------------------------

_Chain = tuple[str, ...]  # of attributes: of ``config`` and ``vocab_size`` for ``model.config.vocab_size``


def _used(name: str, value: Any, chains: set[_Chain] | None) -> Iterator[tuple[str, Any]]:
    """``value``, or of a module the parts that code reads by ``chains``; all of it where that is not known."""
    ends = {way: _end_of(value, way) for way in chains or {()}} if isinstance(value, nn.Module) else {}
    if not ends or any(end is value for end in ends.values()):
        yield name, value
        return
    for way, end in sorted(ends.items(), key=lambda pair: pair[0]):
        path = ".".join((name, *way))
        yield path, end
        if not isinstance(end, (nn.Module, torch.Tensor)):
            yield path, getattr(end, "__dict__", None)


def _end_of(module: nn.Module, chain: _Chain) -> Any:
    """What ``module.a.b`` is; for a method what it is of, for a tensor that was computed the trained thing it is of."""
    trained: Any = module
    value: Any = module
    for name in chain:
        try:
            value = getattr(value, name)
        except Exception:  # code of the user's; it may never get there
            return trained
        value = getattr(value, "__self__", value)
        trained = value if isinstance(value, (nn.Module, nn.Parameter)) else trained
    return trained if isinstance(value, torch.Tensor) else value


def _reads(code: CodeType) -> dict[str, set[_Chain]]:
    """The variables and attributes that code and functions in it load, with the attributes that it then reads."""
    found: dict[str, set[_Chain]] = {}
    after: _Chain = ()
    for step in reversed([step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]):
        if not step.opname.startswith(_LOADS):
            after = ()
            continue
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)  # some load two variables
        for name in reversed(names):
            found.setdefault(name, set()).add(after)
            after = (name, *after) if step.opname.startswith(_OF_OBJECTS) else ()
    for part in _codes_in(code):
        for name, chains in _reads(part).items():
            found.setdefault(name, set()).update(chains)
    return found


def _names_read(code: CodeType) -> set[str]:
    return set(code.co_names).union(*map(_names_read, _codes_in(code)))


def _globals_read(code: CodeType) -> set[str]:
    mine = {str(step.argval) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return mine.union(*map(_globals_read, _codes_in(code)))


def _codes_in(code: CodeType) -> list[CodeType]:
    """Of functions and comprehensions in it."""
    return [part for part in code.co_consts if isinstance(part, CodeType)]
