"""Reads the stages of one save that a rank sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ldt.errors import CheckpointError
from ldt.train.checkpoint.files import damaged
from ldt.train.checkpoint.optimizer_state import tensor_key
from ldt.train.checkpoint.stage_manifest import OptimizerRecord
from ldt.train.checkpoint.stage_reader import StageReader
from ldt.train.checkpoint.tensor_names import model_key

__all__ = ["CheckpointReader", "some"]


class CheckpointReader:
    """Finds tensors in the ``folders`` of complete stages, by number, and reads them.

    Looks into the folder of ``own_stage`` first, and opens others only for what it lacks. First request the model, then
    check the files, request the rest, and read. No tensor is changed before ``read``.
    """

    def __init__(self, folders: Mapping[int, Path], own_stage: int = 0) -> None:
        self._folders = dict(sorted(folders.items(), key=lambda item: (item[0] != own_stage, item[0])))
        self._opened: dict[int, StageReader] = {}
        self._stored: dict[str, tuple[StageReader, str]] = {}
        self._wanted: dict[StageReader, list[dict[str, torch.Tensor]]] = {}

    def stage_readers(self) -> Iterator[StageReader]:
        """The readers of all stages. Each is opened when the iteration reaches it."""
        for stage, folder in self._folders.items():
            if stage not in self._opened:
                self._opened[stage] = StageReader(folder)
            yield self._opened[stage]

    def stage_reader(self, stage: int) -> StageReader | None:
        """The reader of ``stage``; None if this rank does not see the stage."""
        if stage not in self._folders:
            return None
        return next(reader for reader in self.stage_readers() if reader.folder == self._folders[stage])

    # -- the model -------------------------------------------------------------------------------------------

    def want_model(self, tensors: Mapping[Sequence[str], torch.Tensor]) -> None:
        """Request the model's ``tensors``, keyed by the names of each. Raises CheckpointError naming missing ones."""
        missing, other = [], []
        for names, tensor in tensors.items():
            found = next(filter(None, map(self._find, names)), None)
            if found is None:
                missing.append(names[0])
                continue
            reader, stored = self._stored[names[0]] = found
            shape = reader.tensors[model_key(stored)].size
            if shape != tensor.shape:
                other.append(
                    f"{names[0]} has shape {list(tensor.shape)} here, {list(shape)} in that of stage "
                    f"{reader.record.stage}"
                )
            self._want(reader, model_key(stored), tensor)
        if missing:
            raise CheckpointError(f"not in the checkpoint: {some(missing)}. {self._advice(missing)}")
        if other:
            raise CheckpointError(f"the checkpoint is of another model: {some(other)}")

    def stored_name(self, name: str) -> str:
        """The stored name of a wanted tensor, given its first name."""
        return self._stored[name][1]

    def _find(self, name: str) -> tuple[StageReader, str] | None:
        for reader in self.stage_readers():
            stored = reader.record.aliases.get(name, name)
            if model_key(stored) in reader.tensors:
                return reader, stored
        return None

    def _advice(self, missing: Sequence[str]) -> str:
        topology = next(reader.record.topology for reader in self.stage_readers())
        absent = sorted(set(range(topology.num_stages)) - self._folders.keys())
        if absent:
            return (
                f"These paths have stages {sorted(self._folders)} of {topology.to_text()}, but not {absent}: give the "
                "paths of those, too"
            )
        if all(name.startswith("chunk.") for name in missing):
            return (
                f"It is of {topology.to_text()}, and these names are those of chunks, which fit no other split of the "
                "model: save and load with names=, which gives names in the whole model"
            )
        return f"It is of {topology.to_text()}, of which all stages are here: is it of this model, named the same way?"

    # -- optimizer and extra states ---------------------------------------------------------------------------

    def optimizer_of(self, stored: str) -> OptimizerRecord | None:
        """The record of the optimizer of the parameter stored as ``stored``; None if it was in no optimizer."""
        record = self._reader_of(stored).record.optimizer
        if record is None or not any(stored in group.params for group in record.groups):
            return None
        return record

    def shape(self, stored: str, state: str | None) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of a tensor in the state of a parameter; of the parameter itself if ``state`` is None."""
        reader = self._reader_of(stored)
        key = model_key(stored) if state is None else tensor_key(stored, state)
        if key not in reader.tensors:
            raise damaged(reader.folder, f"it lacks {key}")
        return reader.tensors[key].size, reader.tensors[key].properties.dtype

    def want_optimizer(self, stored: str, state: str, tensor: torch.Tensor) -> None:
        self._want(self._reader_of(stored), tensor_key(stored, state), tensor)

    def extra(self, name: str) -> Any:
        """The state that was saved under ``name`` in ``extra``. Raises CheckpointError if there is none."""
        for reader in self.stage_readers():
            if name in reader.record.extra:
                return reader.record.extra[name]
        raise CheckpointError(
            f"the checkpoint has no state of {name!r}: it was saved without extra={{{name!r}: ...}}"
        )

    # -- reading ---------------------------------------------------------------------------------------------

    def check_files(self) -> None:
        """Raise CheckpointError if a requested file cannot be read."""
        for reader in self._wanted:
            reader.check_files()

    def read(self) -> None:
        """Fill all requested tensors."""
        for reader, rounds in self._wanted.items():
            for tensors in rounds:
                reader.read(tensors)

    def _reader_of(self, stored: str) -> StageReader:
        return next(reader for reader, name in self._stored.values() if name == stored)

    def _want(self, reader: StageReader, key: str, tensor: torch.Tensor) -> None:
        """Request one tensor. Weights that are no longer tied request the same one twice: in two rounds."""
        rounds = self._wanted.setdefault(reader, [])
        free = next((tensors for tensors in rounds if key not in tensors), None)
        if free is None:
            free = {}
            rounds.append(free)
        free[key] = tensor.detach()


def some(names: Sequence[str]) -> str:
    """The first three names and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
