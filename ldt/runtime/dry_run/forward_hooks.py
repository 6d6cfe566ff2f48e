"""Skips user-defined forward hooks in dry runs, and runs the hooks that layers themselves depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn

from ldt._torch_private import forward_hooks, forward_pre_hooks, global_forward_hooks
from ldt.untrusted import plain

__all__ = ["ForwardHooks", "call_with_layer_hooks", "is_defined_in", "skipped_hooks"]

# Python modules whose hooks a layer depends on. No user wrote them, so they run.
_LAYER_HOOK_MODULES = ("torch.distributed.tensor", "torch.nn.utils", "transformers.integrations")
_NAME_LIMIT = 200


class ForwardHooks:
    """Publishes to all ranks which chunks have forward hooks that a dry run skipped.

    A hook may change the output of its chunk, so that the dry run of the next chunk gets inputs that never occur. The
    rank of a chunk with a skipped hook sets a key in the mesh's store once. A rank whose dry run fails reads the keys.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self._published: set[int] = set()

    def publish(self, chunk: int, module: nn.Module) -> None:
        """Publish that the output specs of ``chunk`` were inferred without its hooks, if it has any."""
        name = next(skipped_hooks(module), None)
        if name is not None and chunk not in self._published:
            self._published.add(chunk)
            self._store.set(self._name(chunk), name)

    def advice(self, chunk: int, module: nn.Module) -> str:
        """Return advice for a failed dry run of ``chunk``: which skipped hooks may be the cause, and what to do."""
        names: dict[int, str | None] = {chunk: next(skipped_hooks(module), None)}
        with suppress(Exception):  # a failed lookup must not hide the original error
            for earlier in range(chunk):
                if self._store.check([self._name(earlier)]):
                    names[earlier] = self._store.get(self._name(earlier)).decode()
        return "".join(
            f". Chunk {hooked} has a forward hook ({plain(name, _NAME_LIMIT)}), which shape inference does not run: if "
            "it changes the inputs or outputs of that chunk, give the chunk a method output_spec(*input_specs) that "
            "returns one ldt.runtime.TensorSpec per output"
            for hooked, name in sorted(names.items())
            if name is not None
        )

    def _name(self, chunk: int) -> str:
        return f"{self._key}/forward-hooks/{chunk}"


def skipped_hooks(module: nn.Module) -> Iterator[str]:
    """Yield the names of the hooks that a dry run of ``module`` skips."""
    for path, part in module.named_modules():
        hooks = (hook for hook, _ in (*forward_pre_hooks(part), *forward_hooks(part)))
        yield from (_named(hook, path) for hook in hooks if not is_defined_in(hook, _LAYER_HOOK_MODULES))
    yield from (_named(hook, "all modules") for hook in global_forward_hooks())


def call_with_layer_hooks(made: nn.Module, original: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of ``made``, a copy of ``original``, with the hooks that layers depend on."""
    for hook, takes_kwargs in forward_pre_hooks(original):
        if is_defined_in(hook, _LAYER_HOOK_MODULES):
            if takes_kwargs:
                args, kwargs = hook(made, args, kwargs) or (args, kwargs)
                continue
            result = hook(made, args)
            args = args if result is None else result if isinstance(result, tuple) else (result,)
    output = made.forward(*args, **kwargs)
    for hook, takes_kwargs in forward_hooks(original):
        if is_defined_in(hook, _LAYER_HOOK_MODULES):
            by_name = (kwargs,) if takes_kwargs else ()
            result = hook(made, args, *by_name, output)
            output = output if result is None else result
    return output


def is_defined_in(hook: Callable[..., Any], names: tuple[str, ...]) -> bool:
    """Whether ``hook`` is defined in one of the Python modules ``names`` or their submodules."""
    while isinstance(hook, partial):
        hook = hook.func
    found = getattr(hook, "__module__", None) or type(hook).__module__
    return any(found == name or found.startswith(f"{name}.") for name in names)


def _named(hook: Callable[..., Any], path: str) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{name} on {path}" if path else name
