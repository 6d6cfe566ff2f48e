"""A stand-in for a module: copies of its parts and of what they hold, with fake tensors in place of tensors."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedFakeTensorException

from ldt.runtime.forward_hooks import call_with_layer_hooks, is_of

__all__ = ["StandIn", "is_plain", "slots_of"]

_MAX_ARRAY_BYTES = 1 << 24
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BY_REFERENCE = frozenset({"torch", "numpy", *sys.stdlib_module_names} - {"types", "collections"})


class StandIn:
    """Copies what is reachable from modules and functions: containers, objects of plain classes, closures.

    Tensors become fakes of ``mode``, the same one for the same tensor, and nothing of their memory is copied. Random
    generators and arrays are copied. What is left as it is: objects of the standard library and of compiled classes,
    such as files, locks and process groups, and whatever has a ``__del__``. Modules run without their hooks, but for
    those by which layers of ``parallelize_module`` and of ``torch.nn.utils`` work.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._copies: dict[int, Any] = {}
        self._originals: list[Any] = []  # so that no other object gets their ids

    def of(self, value: Any) -> Any:
        """The copy of ``value``."""
        if type(value) in _ATOMS:
            return value
        if id(value) not in self._copies:
            self._originals.append(value)
            self._keep(value, value)  # until there is a copy
            try:
                self._keep(value, self._copy(value))
            except Exception:  # of a class of its own mind: it stays as it is
                self._keep(value, value)
        return self._copies[id(value)]

    def moved(self) -> bool:
        """Whether a random generator of the host, or a number or word that something keeps, is not as its original."""
        pairs = ((value, self._copies[id(value)]) for value in self._originals)
        return any(_state(one) != _state(other) for one, other in pairs if one is not other)

    def release(self) -> None:
        """Let go of all copies, which hold each other."""
        copies = [made for value in self._originals if (made := self._copies[id(value)]) is not value]
        self._copies.clear()
        for made in copies:
            if isinstance(made, (list, dict, set, collections.deque)):
                made.clear()
            elif isinstance(made, CellType):
                del made.cell_contents
            elif isinstance(made, nn.Module) or is_plain(type(made)):
                if hasattr(type(made), "__del__"):
                    made.__class__ = nn.Module  # its own would end what the original still uses
                if hasattr(made, "__dict__"):
                    vars(made).clear()

    def _keep(self, value: Any, made: Any) -> Any:
        self._copies[id(value)] = made
        return made

    # -- one method per kind -----------------------------------------------------------------------------------

    @singledispatchmethod
    def _copy(self, value: Any) -> Any:
        if type(value).__module__.partition(".")[0] == "numpy":
            return copy.deepcopy(value) if getattr(value, "nbytes", 0) <= _MAX_ARRAY_BYTES else value
        if not is_plain(type(value)):
            return value
        try:
            made = self._keep(value, object.__new__(type(value)))
        except TypeError:  # of a compiled base
            return value
        for name, entry in slots_of(value):
            object.__setattr__(made, name, self.of(entry))
        if hasattr(value, "__dict__"):
            vars(made).update({name: self.of(entry) for name, entry in vars(value).items()})
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
        if isinstance(value, torch.jit.ScriptModule):
            return value
        compiled = vars(value).get("_modules", {}).get("_orig_mod")
        if compiled is not None:  # torch.compile: what it was made of has the same shapes
            return self.of(compiled)
        made = self._keep(value, object.__new__(type(value)))
        for name, entry in vars(value).items():
            vars(made)[name] = collections.OrderedDict() if name in _HOOKS else self.of(entry)
        # What torch.nn.Module calls in place of the forward with its hooks and those of all modules.
        vars(made)["_compiled_call_impl"] = partial(call_with_layer_hooks, made, value)
        return made

    @_copy.register(list)
    @_copy.register(collections.deque)
    def _(self, value: Any) -> Any:
        made = self._keep(value, copy.copy(value))
        for place, entry in enumerate(value):
            made[place] = self.of(entry)
        return made

    @_copy.register
    def _(self, value: dict) -> Any:  # type: ignore[type-arg]
        made = self._keep(value, copy.copy(value))
        for key, entry in value.items():
            dict.__setitem__(made, key, self.of(entry))
        return made

    @_copy.register
    def _(self, value: tuple) -> Any:  # type: ignore[type-arg]
        entries = list(map(self.of, value))
        same = all(one is other for one, other in zip(entries, value, strict=True))
        return value if same else tuple.__new__(type(value), entries)

    @_copy.register(set)
    @_copy.register(bytearray)
    @_copy.register(weakref.WeakKeyDictionary)
    @_copy.register(weakref.WeakValueDictionary)
    @_copy.register(itertools.count)
    @_copy.register(itertools.cycle)
    @_copy.register(random.Random)
    def _(self, value: Any) -> Any:
        return copy.copy(value) if not isinstance(value, random.Random) else copy.deepcopy(value)

    @_copy.register
    def _(self, value: SimpleNamespace) -> Any:
        made = self._keep(value, copy.copy(value))
        vars(made).update({name: self.of(entry) for name, entry in vars(value).items()})
        return made

    @_copy.register
    def _(self, value: torch.Generator) -> Any:
        return value.clone_state()

    @_copy.register
    def _(self, value: weakref.ref) -> Any:  # type: ignore[type-arg]
        target = value()
        return value if target is None else weakref.ref(self.of(target))

    @_copy.register
    def _(self, value: MethodType) -> Any:
        return MethodType(self.of(value.__func__), self.of(value.__self__))

    @_copy.register
    def _(self, value: functools.partial) -> Any:  # type: ignore[type-arg]
        args, keywords = self.of(value.args), self.of(value.keywords)
        return type(value)(self.of(value.func), *args, **keywords)

    @_copy.register
    def _(self, value: FunctionType) -> Any:
        if not value.__closure__ or is_of(value, ("torch",)):
            return value
        code, space, name, defaults = value.__code__, value.__globals__, value.__name__, value.__defaults__
        made = self._keep(
            value, FunctionType(code, space, name, defaults, tuple(map(self.of, value.__closure__)))
        )
        made.__kwdefaults__ = value.__kwdefaults__
        vars(made).update(vars(value))
        return made

    @_copy.register
    def _(self, value: CellType) -> Any:
        made = self._keep(value, CellType())
        with suppress(ValueError):  # an empty one
            made.cell_contents = self.of(value.cell_contents)
        return made


def is_plain(kind: type) -> bool:
    """Whether objects of ``kind`` are nothing but their attributes, as far as one can tell."""
    root, _, rest = kind.__module__.partition(".")
    of_ours = root == "ldt" and rest.partition(".")[0] in ("runtime", "_C")
    return not (
        root in _BY_REFERENCE
        or of_ours
        or hasattr(kind, "__del__")
        or not kind.__flags__ & 1 << 9  # compiled
        or issubclass(kind, (type, ModuleType, Enum))
    )


def slots_of(value: object) -> Iterator[tuple[str, Any]]:
    """The attributes of ``value`` that lie in ``__slots__``."""
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _state(value: Any) -> object:
    """Where a random generator of the host stands, which plain values are kept; None for anything else."""
    if isinstance(value, (list, collections.deque)):
        return [entry if type(entry) in _ATOMS else None for entry in value]
    kept = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if isinstance(kept, dict) and not isinstance(value, (torch.Tensor, FunctionType)):
        names = {name: entry for name, entry in kept.items() if type(entry) in _ATOMS}
        return names | {
            f"__slots__.{name}": entry for name, entry in slots_of(value) if type(entry) in _ATOMS
        }
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value).__module__.startswith("numpy.random"):
        return repr(getattr(value, "bit_generator", value).__getstate__())
    return None
