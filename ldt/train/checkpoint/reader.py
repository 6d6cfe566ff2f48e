"""Reads a stage's tensors. Files of a cloud's disk are not trusted: nothing in them can make a reader run code."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ldt.errors import LdtError
from ldt.train.checkpoint.layout import file_errors
from ldt.train.checkpoint.record import StageRecord

__all__ = ["StageReader"]

_METADATA = ".metadata"
_OF_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_OF_METADATA, "BytesStorageMetadata"),
    (_OF_METADATA, "ChunkStorageMetadata"),
    (_OF_METADATA, "Metadata"),
    (_OF_METADATA, "MetadataIndex"),
    (_OF_METADATA, "StorageMeta"),
    (_OF_METADATA, "TensorProperties"),
    (_OF_METADATA, "TensorStorageMetadata"),
    (_OF_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # from Python 3.13 on
}


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that the metadata of tensors is made of, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise LdtError(f"it asks for {module}.{name}, which has no place in the metadata of tensors")


class StageReader:
    """The tensors in the complete ``folder`` of a stage, by key, and its ``record``.

    Raises LdtError that names the file where it is damaged, or holds what a checkpoint of tensors has no use for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with file_errors("a stage of the checkpoint cannot be read"):
            self.record = StageRecord.read(folder)

    @cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Sizes, dtypes and pieces of the tensors, by key."""
        found = {}
        for key, entry in self._metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):  # torch would unpickle it without a question
                raise LdtError(f"{self.folder / _METADATA} is not used: {key} is no tensor there")
            found[key] = entry
        return found

    def check_files(self) -> None:
        """Raise LdtError if a file that has tensors is missing, cut short, or outside of the folder."""
        ends: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            if not _is_file_name(info.relative_path) or info.transform_descriptors:
                raise LdtError(
                    f"{self.folder / _METADATA} is not used: it names the file {info.relative_path!r}, expected one "
                    "in its own folder, as it is"
                )
            end = info.offset + info.length
            ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
        for name, end in ends.items():
            with file_errors("a file of the checkpoint cannot be read"):
                size = (self.folder / name).stat().st_size
            if size < end:
                raise LdtError(f"{self.folder / name} is cut short: expected {end} bytes, got {size}")

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
            raise LdtError(f"{self.folder} is damaged: a tensor in it cannot be read") from cause

    @cached_property
    def _metadata(self) -> Metadata:
        file = self.folder / _METADATA
        with file_errors("a file of the checkpoint cannot be read"), file.open("rb") as stream:
            return _unpickled(stream, file)


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name


def _unpickled(stream: IO[bytes], file: Path) -> Metadata:
    try:
        metadata = _MetadataUnpickler(stream).load()
    except LdtError as error:
        raise LdtError(f"{file} is not read: {error}. Do not use a checkpoint that you do not know") from None
    except OSError:
        raise
    except Exception as error:  # what a damaged pickle raises can be anything
        raise LdtError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise LdtError(f"{file} is damaged: expected the metadata of tensors, got {type(metadata).__name__}")
    return metadata


class _Reader(FileSystemReader):
    """Reads with metadata that were looked at before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._known = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._known
