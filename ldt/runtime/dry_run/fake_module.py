"""Copies a module and everything it holds, with fake tensors in place of tensors."""

from __future__ import annotations

import collections
import copy
import functools
import random
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from functools import partial, singledispatchmethod
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from ldt._torch_private import FakeTensor, FakeTensorMode, UnsupportedFakeTensorException
from ldt.runtime.dry_run.forward_hooks import call_with_layer_hooks, is_defined_in
from ldt.runtime.dry_run.python_state import ATOMS, reduce_iterator, slots_of, state_of, uncopyable_iterator

__all__ = ["FakeCopies", "is_plain"]

_MAX_ARRAY_BYTES = 1 << 24
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DICTS: tuple[Any, ...] = (
    collections.OrderedDict,
    dict,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
)
_CONTAINERS: tuple[Any, ...] = (list, set, collections.deque, weakref.WeakSet, *_DICTS)
_BY_REFERENCE = frozenset({"torch", "numpy", *sys.stdlib_module_names} - {"types", "collections"})


class FakeCopies:
    """Copies everything reachable from modules and functions: containers, objects of plain classes, closures.

    Each tensor becomes one fake tensor of ``mode`` without copying memory; TorchScript modules are deep-copied. Random
    generators and arrays are copied. Objects of the standard library and of compiled classes, such as files, locks and
    process groups, and objects with a ``__del__`` are shared with the original. Copied modules run without hooks,
    except those that layers of ``parallelize_module`` and ``torch.nn.utils`` depend on. A context manager: on exit the
    copies are cleared.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._copies: dict[int, Any] = {}
        self._originals: list[Any] = []  # keeps their ids from being reused

    def copy_of(self, value: Any) -> Any:
        """Return the copy of ``value``."""
        if type(value) in ATOMS:
            return value
        if id(value) not in self._copies:
            self._originals.append(value)
            self._record(value, value)  # until the copy exists
            try:
                self._record(value, self._copy(value))
            except Exception:  # a class that resists copying: its object is shared
                self._record(value, value)
        return self._copies[id(value)]

    def state_changed(self) -> bool:
        """Whether a random generator of the host, an iterator or a plain value differs from its original."""
        pairs = ((value, self._copies[id(value)]) for value in self._originals)
        return any(state_of(one) != state_of(other) for one, other in pairs if one is not other)

    def __enter__(self) -> FakeCopies:
        return self

    def __exit__(self, *unused: object) -> None:
        """Clear all copies: they form reference cycles."""
        copies = [made for value in self._originals if (made := self._copies[id(value)]) is not value]
        self._copies.clear()
        for made in copies:
            if isinstance(made, _CONTAINERS):
                made.clear()
            elif isinstance(made, CellType):
                del made.cell_contents
            elif isinstance(made, nn.Module) or is_plain(type(made)):
                if hasattr(type(made), "__del__"):
                    made.__class__ = nn.Module  # its own __del__ would release what the original still uses
                if hasattr(made, "__dict__"):
                    vars(made).clear()

    def _record(self, value: Any, made: Any) -> Any:
        self._copies[id(value)] = made
        return made

    # -- one method per type -----------------------------------------------------------------------------------

    @singledispatchmethod
    def _copy(self, value: Any) -> Any:
        if type(value).__module__.partition(".")[0] == "numpy":
            return copy.deepcopy(value) if getattr(value, "nbytes", 0) <= _MAX_ARRAY_BYTES else value
        return self._copy_object(value)

    def _copy_object(self, value: Any) -> Any:
        if not is_plain(type(value)):
            return value
        try:
            made = self._record(value, object.__new__(type(value)))
        except TypeError:  # it has a compiled base
            return value
        for name, entry in slots_of(value):
            object.__setattr__(made, name, self.copy_of(entry))
        if hasattr(value, "__dict__"):
            vars(made).update({name: self.copy_of(entry) for name, entry in vars(value).items()})
        return made

    @_copy.register
    def _(self, value: torch.Tensor) -> Any:
        if isinstance(value, FakeTensor):
            return value
        with suppress(UnsupportedFakeTensorException):
            return self._mode.from_tensor(value)
        return value

    @_copy.register
    def _(self, value: nn.Module) -> Any:
        if isinstance(
            value, torch.jit.ScriptModule
        ):  # cannot hold fakes, and keeps its state outside of __dict__
            return self._record(value, copy.deepcopy(value))
        compiled = vars(value).get("_modules", {}).get("_orig_mod")
        if compiled is not None:  # torch.compile: the original module has the same shapes
            return self.copy_of(compiled)
        made = self._record(value, object.__new__(type(value)))
        for name, entry in vars(value).items():
            vars(made)[name] = collections.OrderedDict() if name in _HOOKS else self.copy_of(entry)
        # torch.nn.Module calls this in place of the forward with its own and the global hooks.
        impl = vars(value).get("_compiled_call_impl")
        original = impl.args[1] if isinstance(impl, partial) and impl.func is call_with_layer_hooks else value
        vars(made)["_compiled_call_impl"] = partial(call_with_layer_hooks, made, original)
        return made

    @_copy.register(list)
    @_copy.register(collections.deque)
    def _(self, value: Any) -> Any:
        made = self._record(value, copy.copy(value))
        for index, entry in () if ATOMS.issuperset(map(type, value)) else enumerate(value):
            made[index] = self.copy_of(entry)
        return made

    @_copy.register(dict)
    @_copy.register(weakref.WeakKeyDictionary)
    @_copy.register(weakref.WeakValueDictionary)
    def _(self, value: Any) -> Any:
        made = self._record(value, copy.copy(value))
        kind = next(
            kind for kind in _DICTS if isinstance(value, kind)
        )  # bypasses overrides of a user's subclass
        pairs = [(self.copy_of(key), self.copy_of(entry)) for key, entry in value.items()]
        if any(key is not old for (key, _), old in zip(pairs, value, strict=True)):
            kind.clear(made)
        for key, entry in pairs:
            kind.__setitem__(made, key, entry)
        return made

    @_copy.register(tuple)
    @_copy.register(frozenset)
    def _(self, value: Any) -> Any:
        old = list(value)
        entries = list(map(self.copy_of, old))
        same = all(one is other for one, other in zip(entries, old, strict=True))
        root = tuple if isinstance(value, tuple) else frozenset
        return value if same else root.__new__(type(value), entries)

    @_copy.register(set)
    @_copy.register(weakref.WeakSet)
    def _(self, value: Any) -> Any:
        made = self._record(value, copy.copy(value))
        entries = list(map(self.copy_of, value))
        made.clear()
        made.update(entries)
        return made

    @_copy.register
    def _(self, value: Iterator) -> Any:  # type: ignore[type-arg]
        if type(value).__module__ not in ("builtins", "itertools"):
            return self._copy_object(value)
        try:
            make, args, *state = reduce_iterator(value)
        except TypeError:
            return uncopyable_iterator(type(value).__name__)
        made = make(*map(self.copy_of, args))
        if state:
            made.__setstate__(self.copy_of(state[0]))
        return made

    @_copy.register(bytearray)
    @_copy.register(random.Random)
    def _(self, value: Any) -> Any:
        return copy.deepcopy(value)

    @_copy.register
    def _(self, value: SimpleNamespace) -> Any:
        made = self._record(value, copy.copy(value))
        vars(made).update({name: self.copy_of(entry) for name, entry in vars(value).items()})
        return made

    @_copy.register
    def _(self, value: torch.Generator) -> Any:
        return value.clone_state()

    @_copy.register
    def _(self, value: weakref.ref) -> Any:  # type: ignore[type-arg]
        target = value()
        return value if target is None else weakref.ref(self.copy_of(target))

    @_copy.register
    def _(self, value: MethodType) -> Any:
        return MethodType(self.copy_of(value.__func__), self.copy_of(value.__self__))

    @_copy.register
    def _(self, value: functools.partial) -> Any:  # type: ignore[type-arg]
        args, keywords = self.copy_of(value.args), self.copy_of(value.keywords)
        return type(value)(self.copy_of(value.func), *args, **keywords)

    @_copy.register
    def _(self, value: FunctionType) -> Any:
        if not value.__closure__ or is_defined_in(value, ("torch",)):
            return value
        code, space, name, defaults = value.__code__, value.__globals__, value.__name__, value.__defaults__
        made = self._record(
            value, FunctionType(code, space, name, defaults, tuple(map(self.copy_of, value.__closure__)))
        )
        made.__kwdefaults__ = value.__kwdefaults__
        vars(made).update(vars(value))
        return made

    @_copy.register
    def _(self, value: CellType) -> Any:
        made = self._record(value, CellType())
        with suppress(ValueError):  # an empty cell
            made.cell_contents = self.copy_of(value.cell_contents)
        return made


def is_plain(kind: type) -> bool:
    """Whether objects of ``kind`` consist of their attributes alone, as far as one can tell."""
    root, _, rest = kind.__module__.partition(".")
    of_ours = root == "ldt" and rest.partition(".")[0] in ("runtime", "_C")
    return not (
        root in _BY_REFERENCE
        or of_ours
        or hasattr(kind, "__del__")
        or not kind.__flags__ & 1 << 9  # compiled
        or issubclass(kind, (type, ModuleType, Enum))
    )
