"""Reads a stage's tensors from the parts that its ranks wrote."""

from __future__ import annotations

import io
import logging
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
from ldt.train.checkpoint.files import damaged
from ldt.train.checkpoint.layout import file_errors, rank_folder
from ldt.train.checkpoint.rank_metadata import FILE, parse_metadata
from ldt.train.checkpoint.rank_part import RankPart
from ldt.train.checkpoint.stage_manifest import StageManifest
from ldt.train.checkpoint.stage_parts import merge_metadata

__all__ = ["StageReader"]

logger = logging.getLogger(__name__)


class StageReader:
    """Reads the complete ``folder`` of a stage: its manifest, ``record``, and its tensors by key.

    Raises CheckpointError naming the file if it is damaged or contains anything but tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with file_errors("a stage of the checkpoint cannot be read"):
            self.record = StageManifest.read(folder)
        if not self.record.has_checksums:
            logger.info("%s has no checksums: it is of an earlier version", folder)

    @cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Sizes, dtypes and pieces of the tensors, by key."""
        return cast("dict[str, TensorStorageMetadata]", self._metadata.state_dict_metadata)

    def part(self, name: str) -> RankPart:
        """The part written by the rank whose folder has this ``name``."""
        if name not in self._parts:
            self._parts[name] = RankPart(self.folder / name, self.record)
        return self._parts[name]

    def check_files(self) -> None:
        """Raise CheckpointError if a part or a file of a part is missing, cut short or too long."""
        ends: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            end = info.offset + info.length
            ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
        for path, end in ends.items():
            part, _, name = path.partition("/")
            self.part(part).check_size(name, end)

    def check_rest(self) -> None:
        """Read and check whatever has not been read of any part. Raises CheckpointError if it is damaged."""
        for part in self._parts.values():
            part.check_rest()

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill ``tensors`` (of a DTensor its local part). Sizes must be those of the files; dtypes are converted."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                load(dict(tensors), storage_reader=_Reader(self, self._metadata), no_dist=True)
        except CheckpointException as error:  # a BaseException
            cause = next((caught for caught, _ in error.failures.values()), error)
            if isinstance(cause, CheckpointError):
                raise cause from None
            with file_errors("a tensor of the checkpoint cannot be read"):
                if isinstance(cause, OSError):
                    raise cause from None
            # Not the text of torch.load, which suggests trusting the file.
            raise damaged(self.folder, "a tensor in it cannot be read") from cause

    @cached_property
    def _parts(self) -> dict[str, RankPart]:
        return {}

    @cached_property
    def _metadata(self) -> Metadata:
        topology, stage = self.record.topology, self.record.stage
        names = [
            rank_folder(replica, tp_rank)
            for replica in range(topology.replicas(stage))
            for tp_rank in range(topology.tp[stage])
        ]
        found = {
            name: parse_metadata(self.folder / name / FILE, self.part(name).content(FILE)) for name in names
        }
        return merge_metadata(self.folder, found)


class _Reader(FileSystemReader):
    """Reads with metadata that were checked before, and checks each piece before it is used."""

    def __init__(self, stage: StageReader, metadata: Metadata) -> None:
        super().__init__(stage.folder)
        self._stage = stage
        self._known = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._known

    def _slice_file(self, file: Any, sinfo: Any) -> io.BytesIO:
        """The piece of an opened file for torch.load, in memory so that it is read only once."""
        part, _, name = sinfo.relative_path.partition("/")
        file.seek(sinfo.offset)
        data = file.read(sinfo.length)
        self._stage.part(part).check(name, sinfo.offset, data)
        return io.BytesIO(data)
