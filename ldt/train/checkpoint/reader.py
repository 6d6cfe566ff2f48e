"""Reads a stage's tensors from the parts that its ranks wrote."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ldt.errors import CheckpointError
from ldt.train.checkpoint.layout import file_errors, rank_folder
from ldt.train.checkpoint.metadata import read_metadata
from ldt.train.checkpoint.parts import joined
from ldt.train.checkpoint.record import StageRecord

__all__ = ["StageReader"]


class StageReader:
    """The tensors in the complete ``folder`` of a stage, by key, and its ``record``.

    Raises CheckpointError that names the file where it is damaged, or holds what a checkpoint of tensors has no use
    for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with file_errors("a stage of the checkpoint cannot be read"):
            self.record = StageRecord.read(folder)

    @cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Sizes, dtypes and pieces of the tensors, by key."""
        return cast("dict[str, TensorStorageMetadata]", self._metadata.state_dict_metadata)

    def check_files(self) -> None:
        """Raise CheckpointError if a part or a file of a part is missing, or cut short."""
        ends: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            end = info.offset + info.length
            ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
        for name, end in ends.items():
            with file_errors("a file of the checkpoint cannot be read"):
                size = (self.folder / name).stat().st_size
            if size < end:
                raise CheckpointError(f"{self.folder / name} is cut short: expected {end} bytes, got {size}")

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill ``tensors``, of a DTensor its local part. Sizes must be those of the files, dtypes are converted."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                load(dict(tensors), storage_reader=_Reader(self.folder, self._metadata), no_dist=True)
        except CheckpointException as error:  # a BaseException
            cause = next((caught for caught, _ in error.failures.values()), error)
            with file_errors(f"{self.folder} cannot be read"):
                if isinstance(cause, OSError):
                    raise cause from None
            # Not with the text of torch.load, which suggests to trust the file.
            raise CheckpointError(f"{self.folder} is damaged: a tensor in it cannot be read") from cause

    @cached_property
    def _metadata(self) -> Metadata:
        topology, stage = self.record.topology, self.record.stage
        names = [
            rank_folder(replica, tp_rank)
            for replica in range(topology.replicas(stage))
            for tp_rank in range(topology.tp[stage])
        ]
        return joined(self.folder, {name: read_metadata(self.folder / name) for name in names})


class _Reader(FileSystemReader):
    """Reads with metadata that were looked at before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._known = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._known
