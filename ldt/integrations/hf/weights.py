"""Weights of chunks: read from safetensors, drawn at random, given back by their names in the whole model."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable

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
    """The weights of ``chunks`` by the names they have in the whole model, whose ``load_state_dict`` takes all of them.

    As there, a tied embedding comes under both of its names.
    """
    return {name: tensor for chunk in chunks for name, tensor in chunk.model.state_dict().items()}


@torch.no_grad()
def init_weights(chunks: Iterable[Chunk], seed: int) -> None:
    """Draw weights as transformers does for the model, the same for a layer however the model is split.

    Each module has random numbers of its own, from ``seed`` and its name, drawn on the CPU whatever its device.
    Raises LdtError that names the weights which transformers does not draw module by module, once all others are.
    """
    done: set[int] = set()
    unset: list[str] = []
    for chunk in chunks:
        for name, part, model in with_owners(chunk.model):
            parameters = dict(part.named_parameters(recurse=False))
            if not parameters or done.issuperset(map(id, parameters.values())):
                continue
            done.update(map(id, parameters.values()))
            part._parameters.update({key: _nan_on_cpu(parameter) for key, parameter in parameters.items()})
            with drawn_by_name(seed, name):
                model._init_weights(part)
            for key, parameter in parameters.items():
                drawn = part.get_parameter(key)
                if drawn.isnan().any():
                    unset.append(f"{name}.{key}")
                parameter.copy_(drawn)
                part._parameters[key] = parameter
    if unset:
        kind = type(chunk.model).__name__
        raise LdtError(
            f"the modules of {kind} do not draw their own {some(unset)}, which are NaN as before: load a checkpoint "
            "of the model instead, made by save_pretrained of a whole one if it is to be random"
        )


def _nan_on_cpu(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.full_like(parameter, torch.nan, device="cpu"), parameter.requires_grad)


@torch.no_grad()
def load_weights(chunks: Iterable[Chunk], path: str | os.PathLike[str]) -> None:
    """Read the weights of ``chunks``, and no others, from a model's folder or hub name.

    They are in model.safetensors, or in the files that model.safetensors.index.json names, of which only those are
    opened (from the hub: fetched) that have one. Tensors are converted to the dtype of the weights.
    Raises LdtError that names what is missing or of another shape, which layers the checkpoint has beyond the
    config's, or the file that is damaged.
    """
    missing: list[str] = []
    reads: dict[str, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    stored = files_of_tensors(path)
    for chunk in chunks:
        sources = by_parameter_name(chunk.model, stored)
        refuse_other_layers(chunk.model, sources, path)
        for names, tensor in _names_of_tensors(chunk.model):
            source = next((sources[name] for name in names if name in sources), None)
            if source is None:
                missing.append(names[0])
            else:
                reads[stored[source]].append((source, tensor))
    if missing:
        raise LdtError(
            f"{os.fspath(path)} lacks weights of these chunks: {some(missing)}. It must be of this "
            "model, and be loaded before adapters are added; experts that are stored one by one are not supported"
        )
    for file, tensors in reads.items():
        _read(path, file, tensors)


def _names_of_tensors(model: PreTrainedModel) -> list[tuple[list[str], torch.Tensor]]:
    """What a checkpoint must have: each tensor once, with all of its names."""
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
