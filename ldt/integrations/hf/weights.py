"""Weights of chunks: read from safetensors, drawn at random, given back by their names in the whole model."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils.hub import cached_file

from ldt.errors import LdtError
from ldt.integrations.hf.chunks import Chunk
from ldt.integrations.hf.skeleton import with_owners

__all__ = ["init_weights", "load_weights", "state_dict"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def state_dict(chunks: Iterable[Chunk]) -> dict[str, torch.Tensor]:
    """The weights of ``chunks`` by the names they have in the whole model, whose ``load_state_dict`` takes all of them.

    As there, a tied embedding comes under both of its names.
    """
    return {name: tensor for chunk in chunks for name, tensor in chunk.model.state_dict().items()}


@torch.no_grad()
def init_weights(chunks: Iterable[Chunk], seed: int) -> None:
    """Draw weights as transformers does for the model, the same for a layer however the model is split.

    Each module has random numbers of its own, from ``seed`` and its name, drawn on the CPU whatever its device.
    """
    done: set[int] = set()
    for chunk in chunks:
        for name, part, model in with_owners(chunk.model):
            parameters = dict(part.named_parameters(recurse=False))
            if not parameters or done.issuperset(map(id, parameters.values())):
                continue
            done.update(map(id, parameters.values()))
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int.from_bytes(digest[:8], "big"))
                part._parameters.update({key: _on_cpu(parameter) for key, parameter in parameters.items()})
                model._init_weights(part)
            for key, parameter in parameters.items():
                parameter.copy_(part.get_parameter(key))
                part._parameters[key] = parameter


def _on_cpu(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)


@torch.no_grad()
def load_weights(chunks: Iterable[Chunk], path: str | os.PathLike[str]) -> None:
    """Read the weights of ``chunks``, and no others, from a model's folder or hub name.

    They are in model.safetensors, or in the files that model.safetensors.index.json names, of which only those are
    opened (from the hub: fetched) that have one. Tensors are converted to the dtype of the weights.
    Raises LdtError that names what is missing or of another shape.
    """
    missing: list[str] = []
    reads: dict[str, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    stored = _stored(path)
    for chunk in chunks:
        sources = _by_parameter_name(chunk.model, stored)
        for names, tensor in _names_of_tensors(chunk.model):
            source = next((sources[name] for name in names if name in sources), None)
            if source is None:
                missing.append(names[0])
            else:
                reads[stored[source]].append((source, tensor))
    if missing:
        others = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise LdtError(
            f"{os.fspath(path)} lacks weights of these chunks: {', '.join(missing[:3])}{others}. It must be of this "
            "model, and be loaded before adapters are added; experts that are stored one by one are not supported"
        )
    for file, tensors in reads.items():
        _read(path, file, tensors)


def _stored(path: str | os.PathLike[str]) -> dict[str, str]:
    """The names in a checkpoint, and the file that has each."""
    index = cached_file(path, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        files: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        return files
    single = cached_file(path, SINGLE, _raise_exceptions_for_missing_entries=False)
    if single is None:
        raise LdtError(
            f"{os.fspath(path)} has neither {SINGLE} nor {INDEX}: save the model as safetensors there"
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)


def _by_parameter_name(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """The names in a checkpoint by what the model calls them: some families were renamed since theirs were saved."""
    renamings = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]

    def renamed(name: str) -> str:
        for renaming in renamings:
            name = renaming.rename_source_key(name)[0]
        return name

    return {renamed(name): name for name in stored}


def _names_of_tensors(model: PreTrainedModel) -> list[tuple[list[str], torch.Tensor]]:
    """What a checkpoint must have: each tensor once, with all of its names."""
    names: dict[int, list[str]] = defaultdict(list)
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names[id(tensor)].append(name)
    return [(same, tensors[same[0]]) for same in names.values()]


def _read(path: str | os.PathLike[str], file: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    with safe_open(cached_file(path, file), framework="pt") as stored:
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
