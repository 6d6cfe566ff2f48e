"""Finds the two stacks of layers of a model with an encoder, and leaves in it what one chunk has of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ldt.integrations.hf.meta_model import PassOn
from ldt.integrations.hf.stand_ins import Absent, Arguments, Entry, Exit, Gate, State, replay

__all__ = ["Laps", "Part", "Stack", "find_laps", "keep"]


@dataclass(frozen=True)
class Stack:
    """Layers that run one after the other: the module ``root`` that runs them, and their list, by name."""

    root: str
    layers: str

    def list_of(self, model: nn.Module) -> nn.ModuleList:
        found = model.get_submodule(self.layers)
        assert isinstance(found, nn.ModuleList)
        return found

    def neighbours(self, model: nn.Module) -> tuple[list[str], list[str]]:
        """The names of modules with parameters within the root before the layers and behind them, as registered."""
        before: list[str] = []
        behind: list[str] = []
        for owner, child in _steps(self.layers, self.root):
            found = before
            for name, module in model.get_submodule(owner).named_children():
                if name == child:
                    found = behind
                elif _has_parameters(module):
                    found.append(f"{owner}.{name}")
        return before, behind


@dataclass(frozen=True)
class Part:
    """What a chunk has: layers of one of the stacks, and whether what is before and behind them."""

    layers: range
    in_encoder: bool = False
    begins: bool = False
    ends: bool = False


@dataclass(frozen=True)
class Laps:
    """Both stacks, the arguments of their layers, and what stand-ins hand to each other."""

    encoder: Stack
    decoder: Stack
    of_encoder: Arguments
    of_decoder: Arguments
    state: State


def stacks_of(model: PreTrainedModel) -> tuple[Stack, Stack]:
    """Return the stacks of the encoder (a vision or audio tower) and of the decoder.

    The decoder is that of transformers' ``get_decoder``; the layers are the longest ModuleList.
    Raises ValueError if there are no two stacks.
    """
    decoder: Any = _any(model).get_decoder()
    root = next((name for name, module in model.named_modules() if module is decoder and name), None)
    if root is None:
        raise ValueError("it has no decoder of its own beside an encoder")
    lists = list(_lists(model))
    inside = [name for name in lists if name.startswith(f"{root}.")]
    outside = [name for name in lists if not name.startswith(f"{root}.")]
    if not inside or not outside:
        raise ValueError(f"it has no layers {'beside' if inside else 'in'} {root}")
    encoder, layers = (
        max(names, key=lambda name: _size(model.get_submodule(name))) for names in (outside, inside)
    )
    roots = [owner for owner, _ in _steps(encoder, "") if owner and not f"{root}.".startswith(f"{owner}.")]
    return Stack(roots[0], encoder), Stack(root, layers)


def find_laps(model: PreTrainedModel) -> Laps:
    """Raises ValueError if the model has not two stacks."""
    encoder, decoder = stacks_of(model)
    of_encoder, of_decoder = (Arguments(stack.list_of(model)[0]) for stack in (encoder, decoder))
    return Laps(encoder, decoder, of_encoder, of_decoder, State())


def keep(model: PreTrainedModel, laps: Laps, part: Part) -> None:
    """Replace all modules with parameters except those of ``part`` by stand-ins.

    The first chunk has what is before the encoder's layers. What is behind them, before the decoder's, and elsewhere in
    the model is in the chunk where the decoder begins, and the rest in the last one.
    """
    encoder, decoder, state = laps.encoder, laps.decoder, laps.state
    before, behind = encoder.neighbours(model)
    first, last = decoder.neighbours(model)
    head = _head(model)
    others = [name for name in _others(model, {encoder.root, decoder.root}) if name not in head]
    seen, runs = encoder.list_of(model), decoder.list_of(model)
    absent = seen[0]
    bridges = part.begins and not part.in_encoder
    _refuse_loose_parameters(model, encoder, decoder, remove=not bridges)

    def like() -> torch.Tensor:
        return next(iter(state.outputs().values()))

    if not (bridges or part.in_encoder):
        _replace(model, [encoder.root], Absent)
        before, behind = [], []
    elif not part.begins or bridges:
        _replace(model, before, lambda module: Absent(module, like if bridges else None))
    if not bridges:
        _replace(model, [*behind, *others, *first], Absent)
    if not part.ends:
        _replace(model, [*last, *head], lambda module: Exit(module, state))
    for index, layer in enumerate(seen):
        if bridges:
            seen[index] = replay(layer, index, state, laps.of_encoder)
        elif index not in part.layers:
            seen[index] = PassOn(layer)
    if part.in_encoder and part.begins:
        model.set_submodule(encoder.layers, Gate(seen, Exit(absent, state, laps.of_encoder)))
    _keep_layers(runs, range(0) if part.in_encoder else part.layers, state, laps.of_decoder)


def _keep_layers(layers: nn.ModuleList, kept: range, state: State, arguments: Arguments) -> None:
    for index, layer in enumerate(layers):
        if index < kept.start:
            layers[index] = Entry(layer, state)
        elif index >= kept.stop:
            layers[index] = Exit(layer, state, arguments)


def _replace(model: nn.Module, names: Collection[str], stand_in: Callable[[nn.Module], nn.Module]) -> None:
    for name in names:
        model.set_submodule(name, stand_in(model.get_submodule(name)))


def _head(model: PreTrainedModel) -> list[str]:
    head: Any = _any(model).get_output_embeddings()
    return [name for name, module in model.named_modules() if module is head]


def _others(model: nn.Module, roots: Collection[str]) -> Iterator[str]:
    """The modules with parameters that are not in ``roots``, nor contain them: each without what contains it."""
    owners = {owner for root in roots for owner, _ in _steps(root, "")}
    for owner in sorted(owners):
        for name, module in model.get_submodule(owner).named_children():
            path = f"{owner}.{name}" if owner else name
            if path not in roots and path not in owners and _has_parameters(module):
                yield path


def _refuse_loose_parameters(model: nn.Module, encoder: Stack, decoder: Stack, remove: bool) -> None:
    """Remove parameters beside the stacks, which the chunk has where the decoder begins; refuse those beside layers."""
    for stack in (encoder, decoder):
        for owner, _ in (*_steps(stack.layers, ""), (stack.layers, "")):
            module = model.get_submodule(owner)
            for name in [*module._parameters]:
                if owner.startswith(stack.root):
                    raise ValueError(
                        f"{owner}.{name} is a parameter beside layers, which belongs to no chunk"
                    )
                if remove:
                    module._parameters[name] = None


def _lists(model: nn.Module) -> Iterator[str]:
    """The names of lists of modules that are not in other lists."""
    found: list[str] = []
    for name, part in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if isinstance(part, nn.ModuleList) and len(part) and not inside:
            found.append(name)
            yield name


def _steps(path: str, root: str) -> Iterator[tuple[str, str]]:
    """Each module on the way from ``root`` to ``path``, and the name of its child there."""
    parts = path.split(".")
    for depth, child in enumerate(parts):
        owner = ".".join(parts[:depth])
        if not root or owner == root or owner.startswith(f"{root}."):
            yield owner, child


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _size(modules: Any) -> tuple[int, int]:
    return len(modules), sum(parameter.numel() for parameter in modules.parameters())


def _any(module: Any) -> Any:
    return module
