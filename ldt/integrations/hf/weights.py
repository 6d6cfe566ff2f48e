"""Loads, initializes and returns the weights of chunks by their names in the whole model."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ldt.errors import LdtError
from ldt.integrations.hf.checkpoint import (
    by_parameter_name,
    files_of_tensors,
    opened,
    refuse_other_layers,
    some,
)
from ldt.integrations.hf.chunks import Chunk
from ldt.integrations.hf.meta_model import with_owners
from ldt.integrations.hf.seeded_init import drawn_by_name

__all__ = ["init_weights", "load_weights", "state_dict"]


def state_dict(chunks: Iterable[Chunk]) -> dict[str, torch.Tensor]:
    """Return the weights of ``chunks`` by their names in the whole model, for its ``load_state_dict``.

    As in the whole model, a tied embedding has both of its names.
    """
    return {name: tensor for chunk in chunks for name, tensor in chunk.model.state_dict().items()}


@torch.no_grad()
def init_weights(chunks: Iterable[Chunk], seed: int) -> None:
    """Draw weights as transformers does for the model. A layer's weights do not depend on how the model is split.

    Each module's random numbers depend only on ``seed``, its name and its device: they are drawn in place by the
    generator of the device, and differ between the CPU, CUDA and NPUs, and between models of GPUs. All generators keep
    their states. For the same numbers everywhere, draw on the CPU and move the chunks.

    Raises LdtError naming the weights that transformers does not draw module by module, after drawing all others.
    """
    done: set[int] = set()
    flags: dict[torch.device, dict[str, torch.Tensor]] = defaultdict(dict)  # whether a weight is still NaN
    for chunk in chunks:
        for name, part, model in with_owners(chunk.model):
            parameters = dict(part.named_parameters(recurse=False))
            if not parameters or done.issuperset(map(id, parameters.values())):
                continue
            done.update(map(id, parameters.values()))
            _draw(part, parameters, model, name, seed)
            for key, parameter in parameters.items():
                flags[parameter.device][f"{name}.{key}"] = parameter.isnan().any()
    # The host waits here, once for each device.
    unset = [
        name
        for same in flags.values()
        for name, is_unset in zip(same, torch.stack([*same.values()]).tolist(), strict=True)
        if is_unset
    ]
    if unset:
        kind = type(chunk.model).__name__
        raise LdtError(
            f"the modules of {kind} do not draw their own {some(unset)}, which are still NaN: load a checkpoint of the "
            "model instead; for random weights, one saved by save_pretrained of a whole model"
        )


def _draw(part: nn.Module, parameters: Mapping[str, nn.Parameter], model: Any, name: str, seed: int) -> None:
    """Draw ``parameters``, all of ``part`` without its children; NaN remains where ``model`` draws nothing."""
    (device,) = {parameter.device for parameter in parameters.values()}
    if device.type == "meta":
        raise LdtError(f"there is no memory to draw {name} in: build the chunk on another device than meta")
    # Other Parameters over the same memory: transformers may have marked these, or put new ones in their place.
    part._parameters.update({key: _as_new(parameter) for key, parameter in parameters.items()})
    with drawn_by_name(seed, name, device):
        model._init_weights(part)
    for key, parameter in parameters.items():
        parameter.copy_(part.get_parameter(key))
        part._parameters[key] = parameter


def _as_new(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().fill_(torch.nan), parameter.requires_grad)


@torch.no_grad()
def load_weights(chunks: Iterable[Chunk], path: str | os.PathLike[str]) -> None:
    """Read only the weights of ``chunks`` from a model's folder or hub name.

    Reads model.safetensors, or the files that model.safetensors.index.json names; opens (from the hub: downloads) only
    those that have a needed tensor. Tensors are converted to the dtype of the weights.
    Raises LdtError naming missing tensors or those of another shape, layers beyond the config's, or a damaged file.
    """
    missing: list[str] = []
    reads: dict[str, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    stored = files_of_tensors(path)
    for chunk in chunks:
        sources = by_parameter_name(chunk.model, stored)
        refuse_other_layers(chunk.model, sources, path)
        for own, tensor in _names_of_tensors(chunk.model):
            names = [*own, *(name for name in chunk.tied.get(own[0], ()) if name not in own)]
            source = next((sources[name] for name in names if name in sources), None)
            if source is None:
                missing.append(names[0])
            else:
                reads[stored[source]].append((source, tensor))
    if missing:
        raise LdtError(
            f"{os.fspath(path)} lacks weights of these chunks: {some(missing)}. It must be a checkpoint of this "
            "model and be loaded before adapters are added; experts that are stored one by one are not supported"
        )
    for file, tensors in reads.items():
        _read(path, file, tensors)


def _names_of_tensors(model: PreTrainedModel) -> list[tuple[list[str], torch.Tensor]]:
    """The tensors that a checkpoint must have, each once, with all of its names."""
    names: dict[int, list[str]] = defaultdict(list)
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names[id(tensor)].append(name)
    return [(same, tensors[same[0]]) for same in names.values()]


def _read(path: str | os.PathLike[str], file: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    with opened(path, file) as stored:
        for name, tensor in tensors:
            if tensor.is_meta:
                raise LdtError(
                    f"there is no memory to load {name} into: build the chunk on another device than meta"
                )
            found = stored.get_tensor(name)
            if found.shape != tensor.shape:
                sizes = f"has shape {list(found.shape)} in {file}, but {list(tensor.shape)} by the config"
                raise LdtError(f"{name} {sizes}: {os.fspath(path)} is not of this model")
            tensor.copy_(found)
