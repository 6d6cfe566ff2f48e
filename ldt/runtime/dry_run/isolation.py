"""Runs a module's code without side effects: restores modes, random states, globals and closures."""

from __future__ import annotations

import collections
import dis
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from ldt._torch_private import (
    is_lru_cache,
    without_dispatch_modes,
    without_function_modes,
    without_saved_tensors_hooks,
)
from ldt.runtime.dry_run.fake_module import is_plain
from ldt.runtime.dry_run.python_state import ATOMS, slots_of

__all__ = ["host_random_states", "isolated", "unseen"]

_MAX_OBJECTS = 10_000  # visited for one module
_MAX_ENTRIES = 100_000  # over all containers; a container that exceeds what is left is not restored
_ABSENT = object()
_LIBRARIES = ("site-packages", "dist-packages", f"{sys.prefix}/lib/python")


@contextmanager
def isolated(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore modes, random states and all state that the code of ``module`` can reach on exit.

    That is: global variables, closures and class attributes that its functions name, and in them the entries of
    containers and the attributes of plain objects, up to 100,000 entries. A container with more is neither restored
    nor searched. Code of installed libraries is not searched.
    """
    with ExitStack() as stack:
        stack.enter_context(without_dispatch_modes())
        stack.enter_context(without_function_modes())
        stack.enter_context(without_saved_tensors_hooks())
        stack.enter_context(_without_autocast_cache())
        stack.enter_context(_uncompiled())
        stack.enter_context(_random_states(device))
        snapshot = _Snapshot()
        for part in module.modules():
            snapshot.add_class(type(part))
        stack.callback(snapshot.restore)
        yield


@contextmanager
def unseen(device: torch.device) -> Iterator[None]:
    """Restore random states on exit, and leave nothing in the cache of autocast. For code that runs twice."""
    with _without_autocast_cache(), _random_states(device):
        yield


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _uncompiled() -> AbstractContextManager[object]:
    """Run compiled functions in eager mode."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _random_states(device: torch.device) -> Iterator[None]:
    of_device = getattr(torch, device.type, None)
    devices = [device] if device.type != "cpu" and hasattr(of_device, "get_rng_state") else []
    options = {"device_type": device.type} if devices else {}
    python, arrays = random.getstate(), sys.modules.get("numpy")
    numpy = None if arrays is None else arrays.random.get_state()
    with torch.random.fork_rng(devices, **options):
        try:
            yield
        finally:
            random.setstate(python)
            if arrays is not None:
                arrays.random.set_state(numpy)


def host_random_states() -> tuple[object, ...]:
    """Return the states of the random generators of Python and NumPy, for comparison."""
    numpy = sys.modules.get("numpy")
    name, keys, *rest = ("", b"") if numpy is None else numpy.random.get_state()
    return random.getstate(), name, bytes(keys), *rest


class _Snapshot:
    """A snapshot of the state that functions of a module can reach outside of the module."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: dict[int, object] = {}
        self._entries_left = _MAX_ENTRIES

    def restore(self) -> None:
        for undo in self._undo:
            undo()

    def add_class(self, kind: type) -> None:
        """Add the attributes of ``kind`` and its bases, and everything their methods reach."""
        for base in kind.__mro__:
            if self._mark_seen(base) and not _in_library(sys.modules.get(base.__module__)):
                own = {name: value for name, value in vars(base).items() if not name.startswith("__")}
                self._undo.append(partial(_reset_class, base, own))
                for value in vars(base).values():
                    self.add(value)

    def add(self, value: Any) -> None:
        """Add everything reachable from ``value``."""
        if isinstance(value, (staticmethod, classmethod, MethodType)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, partial):
            value = value.func
        if isinstance(value, FunctionType):
            self._add_function(value)
        elif is_lru_cache(value):
            self._add_cache(value)
        elif isinstance(value, (list, collections.deque, dict, set, bytearray)):
            self._add_container(value)
        elif isinstance(value, (random.Random, torch.Generator)):
            self._add_generator(value)
        elif isinstance(value, (nn.Module, SimpleNamespace)) or is_plain(type(value)):
            self._add_object(value)

    def _mark_seen(self, value: Any) -> bool:
        if id(value) in self._seen or len(self._seen) >= _MAX_OBJECTS:
            return False
        self._seen[id(value)] = value
        return True

    def _add_function(self, function: FunctionType) -> None:
        if not self._mark_seen(function) or any(path in function.__code__.co_filename for path in _LIBRARIES):
            return
        for cell in function.__closure__ or ():
            content = _content(cell)
            self._undo.append(partial(_refill, cell, content))
            self.add(content)
        space = function.__globals__
        for name in _names(function.__code__):
            value = space.get(name, _ABSENT)
            self._undo.append(partial(_reset, space, name, value))
            if isinstance(value, type) and value.__module__ == function.__module__:
                self.add_class(value)
            self.add(value)

    def _add_container(self, value: Any) -> None:
        if len(value) > self._entries_left or not self._mark_seen(value):
            return
        self._entries_left -= len(value)
        self._undo.append(partial(_replace, value, value.copy()))
        for entry in value.values() if isinstance(value, dict) else value:
            if type(entry) not in ATOMS:
                self.add(entry)

    def _add_cache(self, value: Any) -> None:
        """Clear the cache on restore: its entries are of fake tensors, or can be computed again."""
        if self._mark_seen(value):
            self._undo.append(value.cache_clear)
            self.add(value.__wrapped__)

    def _add_generator(self, value: Any) -> None:
        if self._mark_seen(value):
            python = isinstance(value, random.Random)
            get, put = (value.getstate, value.setstate) if python else (value.get_state, value.set_state)
            self._undo.append(partial(put, get()))

    def _add_object(self, value: Any) -> None:
        if not self._mark_seen(value):
            return
        for name, entry in slots_of(value):
            self._undo.append(partial(object.__setattr__, value, name, entry))
            self.add(entry)
        if hasattr(value, "__dict__"):
            self._add_container(vars(value))


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global variables that ``code`` and its inner functions read or write."""
    steps = dis.get_instructions(code)
    yield from {str(step.argval) for step in steps if step.opname.endswith(("_GLOBAL", "_NAME"))}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _in_library(found: Any) -> bool:
    path = getattr(found, "__file__", None) or ""
    return found is None or inspect.isbuiltin(found) or any(part in path for part in _LIBRARIES)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _refill(cell: CellType, content: Any) -> None:
    if _content(cell) is content:
        return
    if content is _ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = content


def _reset(space: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        space.pop(name, None)
    elif space.get(name, _ABSENT) is not value:
        space[name] = value


def _reset_class(kind: type, own: dict[str, Any]) -> None:
    for name, value in own.items():
        if vars(kind).get(name, _ABSENT) is not value:
            setattr(kind, name, value)
    for name in [name for name in vars(kind) if name not in own and not name.startswith("__")]:
        delattr(kind, name)


def _replace(value: Any, entries: Any) -> None:
    """Restore the entries of a container if they changed."""
    if _identities(value) == _identities(entries):
        return
    value.clear()
    value.update(entries) if isinstance(value, (dict, set)) else value.extend(entries)


def _identities(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [(key if isinstance(key, str) else id(key), id(entry)) for key, entry in container.items()]
    return sorted(map(id, container)) if isinstance(container, set) else list(map(id, container))
