"""Stand in for modules of other chunks, so that the forward of a whole model runs only the layers of one chunk."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ldt._torch_private import pytree
from ldt.integrations.hf.meta_model import PassOn

__all__ = ["Absent", "Arguments", "Entry", "Exit", "Gate", "Reached", "Replay", "State", "replay"]

# What some layers take under names that their signature does not have.
_UNNAMED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Reached(Exception):  # noqa: N818  # not an error
    """The forward has come to the first layer of another chunk."""


class State:
    """What stand-ins hand to each other and to the chunk during one forward."""

    def __init__(self) -> None:
        self._call: dict[str, Any] = {}
        self.clear()

    def clear(self) -> None:
        self.entering: Any = None  # what the layers of earlier chunks return
        self.leaving: tuple[torch.Tensor, dict[str, Any]] | None = None  # what the next layer gets
        self.replayed: list[Mapping[int, torch.Tensor]] = []  # outputs of layers, for each call of an encoder
        self.call = -1  # of the encoder

    def see_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook that keeps the arguments of the decoder, for ``take_call``."""
        self._call = kwargs

    def take_call(self) -> dict[str, Any]:
        call, self._call = self._call, {}
        return call

    def outputs(self) -> Mapping[int, torch.Tensor]:
        return self.replayed[self.call]


class Arguments:
    """The arguments of a layer by name.

    ``carried`` are those that a layer also returns, behind hidden states, for the next one, as layers of T5 do with
    biases of positions.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._signature = inspect.signature(layer.forward)
        named = [p.name for p in self._signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values())
        self._hidden = named[0]
        self.names = (*named[1:], *(_UNNAMED if takes_any else ()))
        self.carried = tuple(name for name in named if name.endswith("position_bias"))

    def of_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the hidden states and the other arguments of a call. Raises ValueError for tensors by other names."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        found = dict(bound.arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                found |= found.pop(name, {})
        hidden = found.pop(self._hidden)
        for name in found.keys() - set(self.names):
            if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(found[name])):
                raise ValueError(f"layers get a tensor {name}, which does not cross to another stage")
        return hidden, {name: found[name] for name in self.names if name in found}

    def given(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a call, of which None under another name than those of the signature are left out."""
        return {name: value for name, value in others.items() if value is not None or name not in _UNNAMED}

    def returned(self, hidden: Any, others: Mapping[str, Any]) -> Any:
        """What a layer returns: hidden states, or a tuple of them and ``carried``."""
        return (hidden, *(others.get(name) for name in self.carried)) if self.carried else hidden


class Absent(nn.Module):
    """Replaces a module before or behind the layers. Returns NaN in the shapes that it would return.

    So a value that another chunk computes, and that is used by mistake, is seen. ``like`` returns what to imitate if
    the shapes depend on values.
    """

    def __init__(self, module: nn.Module, like: Callable[[], torch.Tensor] | None = None) -> None:
        super().__init__()
        self._module = (module,)  # on the meta device, and not a submodule
        self._like = like
        self.register_buffer("_place", torch.empty(0), persistent=False)  # is where the model is

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":
                raise
            found = getattr(self._module[0], name)
        if name == "device":
            return self._place.device
        if isinstance(found, torch.Tensor):
            return torch.full((), torch.nan, dtype=found.dtype, device=self._place.device).expand(found.shape)
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
        try:
            with torch.no_grad():
                output = self._module[0](*args, **kwargs)
        except Exception:
            if self._like is None:
                raise
            output = self._like()
        return pytree.tree_map_only(torch.Tensor, lambda t: _unset(t, self._place.device), output)


class Entry(PassOn):
    """Replaces the layers of earlier chunks. Returns what the last of them has returned."""

    def __init__(self, absent: nn.Module, state: State) -> None:
        super().__init__(absent)
        self._state = state

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._state.entering


class Exit(PassOn):
    """Replaces the next layer of another chunk, and whatever is behind layers. Keeps its arguments and stops."""

    def __init__(self, absent: nn.Module, state: State, arguments: Arguments | None = None) -> None:
        super().__init__(absent)
        self._state, self._arguments = state, arguments

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._state.leaving = self._arguments.of_call(args, kwargs) if self._arguments else (args[0], {})
        raise Reached


class Gate(nn.ModuleList):
    """The layers of an encoder, of which a forward sees only an Exit, as the chunk calls its layers itself."""

    def __init__(self, layers: nn.ModuleList, exit_: Exit) -> None:
        super().__init__(layers)
        self._exit = (exit_,)  # not a submodule
        self.closed = False

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._exit) if self.closed else super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        return self._exit[index] if self.closed else super().__getitem__(index)


class Replay(nn.Module):
    """Replaces a layer of an encoder that has run in another chunk. Returns its output, or NaN if nobody needs that."""

    _ldt_index: int
    _ldt_state: State
    _ldt_arguments: Arguments

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> Any:
        state = self._ldt_state
        state.call += self._ldt_index == 0
        output = state.outputs().get(self._ldt_index)
        if output is None:
            output = _unset(next(iter(state.outputs().values())), hidden.device)
        return self._ldt_arguments.returned(output, {})


def replay(absent: nn.Module, index: int, state: State, arguments: Arguments) -> nn.Module:
    """Return a Replay that is an instance of the layer's class, too, by which transformers finds hidden states."""
    made: Any = _new(type("Replay", (Replay, type(absent)), {}))
    nn.Module.__init__(made)
    made._ldt_index, made._ldt_state, made._ldt_arguments = index, state, arguments
    module: nn.Module = made
    return module


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _unset(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    value = torch.nan if tensor.is_floating_point() else 0
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)
