"""Merges all stages of a checkpoint into one safetensors file that other tools can read."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from ldt.errors import CheckpointError
from ldt.train.checkpoint.catalog import Paths, catalog, folders_of, paths_of
from ldt.train.checkpoint.checkpoint_reader import CheckpointReader
from ldt.train.checkpoint.choice import choose
from ldt.train.checkpoint.layout import file_errors
from ldt.train.checkpoint.tensor_names import model_key

__all__ = ["merge_checkpoint"]

logger = logging.getLogger(__name__)


def merge_checkpoint(paths: Paths, file: str | os.PathLike[str], *, step: int | None = None) -> int:
    """Write the weights of all stages to ``file``, by their names in the whole model, and return the step.

    Needs ``safetensors`` and memory for the whole model, but no process group. ``paths`` is one folder or a list of
    folders that together have all stages of the newest complete step, or of ``step``. Tied weights are written once, by
    the first of their names, as in transformers. Named ``model.safetensors`` beside the model's ``config.json``, the
    file is a checkpoint of transformers.

    Raises CheckpointError if no step is complete, a file is damaged, or two stages have different weights of one name.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("merge_checkpoint needs safetensors: pip install safetensors") from error
    with file_errors("the checkpoint cannot be read"):
        folders = paths_of(paths)
        found = catalog(folders)
    chosen = choose([found], step)
    if chosen is None:
        raise CheckpointError(
            f"no checkpoint is complete under {', '.join(map(str, folders))}: give the paths of all stages, of the "
            "edge and of the cloud"
        )
    with file_errors("the checkpoint cannot be read"):
        checkpoint = CheckpointReader(folders_of(folders, chosen.save))
    with chosen.naming_alternatives():
        tensors = _tensors(checkpoint)
    target = Path(file)
    unfinished = target.with_name(f".{target.name}.unfinished")
    with file_errors("the merged checkpoint cannot be written"):
        try:
            save_file(tensors, unfinished, metadata={"format": "pt"})
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    logger.info("wrote %d tensors of step %d to %s", len(tensors), chosen.save.step, target)
    return chosen.save.step


def _tensors(checkpoint: CheckpointReader) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    prefix = model_key("")
    for reader in checkpoint.stage_readers():
        reader.check_files()
        entries: dict[str, Any] = {key: e for key, e in reader.tensors.items() if key.startswith(prefix)}
        read = {key: torch.empty(e.size, dtype=e.properties.dtype) for key, e in entries.items()}
        reader.read(read)
        reader.check_rest()
        for key, tensor in read.items():
            name = key.removeprefix(prefix)
            other = merged.setdefault(name, tensor)
            if other is not tensor and not torch.equal(other, tensor):
                raise CheckpointError(
                    f"{name} in {reader.folder} differs from the tensor of that name of another stage"
                )
    return merged
