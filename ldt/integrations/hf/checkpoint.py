"""Reads safetensors checkpoints: finds the file of each tensor and matches names to a model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils.hub import cached_file

from ldt.errors import LdtError

__all__ = ["by_parameter_name", "files_of_tensors", "opened", "refuse_other_layers", "some"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def files_of_tensors(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the file of each tensor in a checkpoint, by name."""
    index = cached_file(path, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        return _indexed(Path(index))
    if cached_file(path, SINGLE, _raise_exceptions_for_missing_entries=False) is None:
        raise LdtError(
            f"{os.fspath(path)} has neither {SINGLE} nor {INDEX}: save the model as safetensors there"
        )
    with opened(path, SINGLE) as file:
        return dict.fromkeys(file.keys(), SINGLE)


def _indexed(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes())
    except ValueError as error:
        got = f"no JSON ({error})"
    else:
        files = content.get("weight_map") if isinstance(content, dict) else None
        if isinstance(files, dict) and all(isinstance(file, str) for file in files.values()):
            return files
        got = "another weight_map" if files is not None else "no weight_map"
    raise LdtError(
        f'{index} is not the index of a checkpoint: expected {{"weight_map": {{"name of a tensor": "file"}}}}, '
        f"got {got}. Download or save the model again"
    )


@contextmanager
def opened(path: str | os.PathLike[str], file: str) -> Iterator[Any]:
    """Open a safetensors ``file`` of a checkpoint. Raises LdtError if it is damaged or lacks a requested tensor."""
    found = cached_file(path, file)
    try:
        with safe_open(found, framework="pt") as content:
            yield content
    except SafetensorError as error:
        raise LdtError(
            f"{found} cannot be read as safetensors: {error}. Download or save the model again"
        ) from error


def by_parameter_name(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Map the model's names to those in a checkpoint. Some families were renamed after their checkpoints were saved."""
    renamings = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]

    def renamed(name: str) -> str:
        for renaming in renamings:
            name = renaming.rename_source_key(name)[0]
        return name

    return {renamed(name): name for name in stored}


def refuse_other_layers(model: PreTrainedModel, names: Iterable[str], path: str | os.PathLike[str]) -> None:
    """Raise LdtError if a checkpoint has tensors, by the model's names, of layers beyond the model's last.

    Layers that the model's class says to ignore, such as those that predict further tokens, are fine.
    """
    lengths = {f"{n}.": len(part) for n, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    surplus = [
        name
        for name in names
        if any(
            lengths.get(name[: number.start()], 1 + int(number[0])) <= int(number[0])
            for number in re.finditer(r"(?<=\.)\d+(?=\.)", name)
        )
        and not any(pattern.search(name) for pattern in ignored)
    ]
    if surplus:
        raise LdtError(
            f"{os.fspath(path)} has weights of layers that the config does not have: {some(surplus)}. "
            "Split the model by the config of this checkpoint"
        )


def some(names: list[str]) -> str:
    """The first three names and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
