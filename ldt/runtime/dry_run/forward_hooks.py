"""Hooks of forwards, which do not run where shapes are found, but for those by which layers work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn

from ldt._torch_private import forward_hooks, forward_pre_hooks, global_forward_hooks
from ldt.untrusted import plain

__all__ = ["ForwardHooks", "call_with_layer_hooks", "is_of", "left_out"]

# Hooks by which a layer works, and that no user wrote: they run.
_OF_LAYERS = ("torch.distributed.tensor", "torch.nn.utils", "transformers.integrations")
_NAME_LIMIT = 200


class ForwardHooks:
    """Hooks that chunks of a pipeline have, told to all ranks where a run without them shows what hops carry.

    A hook may change what its chunk returns, so that the next chunk is run on what it never gets. The rank of a chunk
    that has one says so once, by a key in the mesh's store, and whoever then finds an error looks for it.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self._told: set[int] = set()

    def tell(self, chunk: int, module: nn.Module) -> None:
        """The output of ``chunk`` was found without its hooks, if there are any."""
        name = next(left_out(module), None)
        if name is not None and chunk not in self._told:
            self._told.add(chunk)
            self._store.set(self._name(chunk), name)

    def advice(self, chunk: int, module: nn.Module) -> str:
        """For an error where ``chunk`` does not take what comes: whose hooks may be why, and what to do about it."""
        names: dict[int, str | None] = {chunk: next(left_out(module), None)}
        with suppress(Exception):  # the error itself is what counts
            for earlier in range(chunk):
                if self._store.check([self._name(earlier)]):
                    names[earlier] = self._store.get(self._name(earlier)).decode()
        return "".join(
            f". Chunk {hooked} has a forward hook ({plain(name, _NAME_LIMIT)}), which does not run where shapes are "
            "found: if it changes what that chunk takes or returns, give the chunk a method output_spec(*input_specs) "
            "that returns one ldt.runtime.TensorSpec per output"
            for hooked, name in sorted(names.items())
            if name is not None
        )

    def _name(self, chunk: int) -> str:
        return f"{self._key}/forward-hooks/{chunk}"


def left_out(module: nn.Module) -> Iterator[str]:
    """The hooks that a run of the module's stand-in leaves out, by name."""
    for path, part in module.named_modules():
        hooks = (hook for hook, _ in (*forward_pre_hooks(part), *forward_hooks(part)))
        yield from (_named(hook, path) for hook in hooks if not is_of(hook, _OF_LAYERS))
    yield from (_named(hook, "all modules") for hook in global_forward_hooks())


def call_with_layer_hooks(made: nn.Module, original: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``made``'s forward, with the hooks of ``original`` by which layers work."""
    for hook, takes_kwargs in forward_pre_hooks(original):
        if is_of(hook, _OF_LAYERS):
            if takes_kwargs:
                args, kwargs = hook(made, args, kwargs) or (args, kwargs)
                continue
            result = hook(made, args)
            args = args if result is None else result if isinstance(result, tuple) else (result,)
    output = made.forward(*args, **kwargs)
    for hook, takes_kwargs in forward_hooks(original):
        if is_of(hook, _OF_LAYERS):
            by_name = (kwargs,) if takes_kwargs else ()
            result = hook(made, args, *by_name, output)
            output = output if result is None else result
    return output


def is_of(hook: Callable[..., Any], names: tuple[str, ...]) -> bool:
    """Whether the code of ``hook`` is in one of the Python modules of these ``names``."""
    while isinstance(hook, partial):
        hook = hook.func
    found = getattr(hook, "__module__", None) or type(hook).__module__
    return any(found == name or found.startswith(f"{name}.") for name in names)


def _named(hook: Callable[..., Any], path: str) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{name} on {path}" if path else name
