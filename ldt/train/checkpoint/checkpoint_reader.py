"""The stages of one save that a rank sees, and what it wants to read from each."""

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

__all__ = ["Shelf", "some"]


class Shelf:
    """``folders`` are those of complete stages, by number. That of ``own_stage`` is looked into first.

    Others are opened only for what it lacks. First want the model, then check, want the rest, and read: until then no
    tensor is changed.
    """

    def __init__(self, folders: Mapping[int, Path], own_stage: int = 0) -> None:
        self._folders = dict(sorted(folders.items(), key=lambda item: (item[0] != own_stage, item[0])))
        self._opened: dict[int, StageReader] = {}
        self._stored: dict[str, tuple[StageReader, str]] = {}
        self._wanted: dict[StageReader, list[dict[str, torch.Tensor]]] = {}

    def readers(self) -> Iterator[StageReader]:
        """Of all stages, each opened when it is asked for."""
        for stage, folder in self._folders.items():
            if stage not in self._opened:
                self._opened[stage] = StageReader(folder)
            yield self._opened[stage]

    def reader(self, stage: int) -> StageReader | None:
        """None where the stage is not seen."""
        if stage not in self._folders:
            return None
        return next(reader for reader in self.readers() if reader.folder == self._folders[stage])

    # -- the model -------------------------------------------------------------------------------------------

    def want_model(self, tensors: Mapping[Sequence[str], torch.Tensor]) -> None:
        """To be read into ``tensors``, by the names that each has. Raises CheckpointError naming what is not there."""
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
        """What ``name``, the first name of a wanted tensor, is stored as."""
        return self._stored[name][1]

    def _find(self, name: str) -> tuple[StageReader, str] | None:
        for reader in self.readers():
            stored = reader.record.aliases.get(name, name)
            if model_key(stored) in reader.tensors:
                return reader, stored
        return None

    def _advice(self, missing: Sequence[str]) -> str:
        topology = next(reader.record.topology for reader in self.readers())
        absent = sorted(set(range(topology.num_stages)) - self._folders.keys())
        if absent:
            return (
                f"These paths have stages {sorted(self._folders)} of {topology.to_text()}, and not {absent}: give the "
                "paths of those, too"
            )
        if all(name.startswith("chunk.") for name in missing):
            return (
                f"It is of {topology.to_text()}, and these names are those of chunks, which fit no other cut of the "
                "model: save and load with names=, which gives names of the whole model"
            )
        return f"It is of {topology.to_text()}, of which all stages are here: is it of this model, named the same way?"

    # -- the optimizer, and whatever else there is ------------------------------------------------------------

    def optimizer_of(self, stored: str) -> OptimizerRecord | None:
        """What the optimizer of ``stored``, a parameter's stored name, left beside its tensors; None if it had none."""
        record = self._reader_of(stored).record.optimizer
        if record is None or not any(stored in group.params for group in record.groups):
            return None
        return record

    def shape(self, stored: str, state: str | None) -> tuple[torch.Size, torch.dtype]:
        """Of a tensor in the state of a parameter; None: of the parameter."""
        reader = self._reader_of(stored)
        key = model_key(stored) if state is None else tensor_key(stored, state)
        if key not in reader.tensors:
            raise damaged(reader.folder, f"it lacks {key}")
        return reader.tensors[key].size, reader.tensors[key].properties.dtype

    def want_optimizer(self, stored: str, state: str, tensor: torch.Tensor) -> None:
        self._want(self._reader_of(stored), tensor_key(stored, state), tensor)

    def extra(self, name: str) -> Any:
        """The state that was saved under ``name`` in ``extra``. Raises CheckpointError if none was."""
        for reader in self.readers():
            if name in reader.record.extra:
                return reader.record.extra[name]
        raise CheckpointError(
            f"the checkpoint has no state of {name!r}: it was saved without extra={{{name!r}: ...}}"
        )

    # -- reading ---------------------------------------------------------------------------------------------

    def check_files(self) -> None:
        """Raise CheckpointError if a file that is to be read cannot be."""
        for reader in self._wanted:
            reader.check_files()

    def read(self) -> None:
        """Fill all tensors that are wanted."""
        for reader, rounds in self._wanted.items():
            for tensors in rounds:
                reader.read(tensors)

    def _reader_of(self, stored: str) -> StageReader:
        return next(reader for reader, name in self._stored.values() if name == stored)

    def _want(self, reader: StageReader, key: str, tensor: torch.Tensor) -> None:
        """One tensor may be wanted twice, where weights were tied and are not any more: in two rounds."""
        rounds = self._wanted.setdefault(reader, [])
        free = next((tensors for tensors in rounds if key not in tensors), None)
        if free is None:
            free = {}
            rounds.append(free)
        free[key] = tensor.detach()


def some(names: Sequence[str]) -> str:
    """The first three and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
