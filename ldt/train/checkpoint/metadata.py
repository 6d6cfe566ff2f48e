"""Reads what a rank noted of its tensors. Files of a cloud's disk are not trusted: nothing in them runs code."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ldt.errors import CheckpointError
from ldt.train.checkpoint.layout import file_errors

__all__ = ["read_metadata"]

_FILE = ".metadata"
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


_Unpickler: Any = pickle._Unpickler  # the one in Python, of which each instruction can be looked at


class _MetadataUnpickler(_Unpickler):  # type: ignore[misc]
    """Knows the classes that the metadata of tensors is made of, and no other. Changes nothing but objects of them."""

    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def load_build(self) -> None:
        """Give an object its state. With a class, or one of an enum's, that would change the whole process."""
        target = self.stack[-2]
        if not dataclasses.is_dataclass(target) or isinstance(target, type):
            raise CheckpointError(
                f"it would change {target!r:.80}, which is no object of the metadata of tensors"
            )
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"it asks for {module}.{name}, which has no place in the metadata of tensors")


def read_metadata(folder: Path) -> Metadata:
    """The metadata of torch.distributed.checkpoint in ``folder``: of tensors alone, each piece in a file of the folder.

    Raises CheckpointError that names the file where it is damaged, or holds what a checkpoint of tensors has no use
    for.
    """
    file = folder / _FILE
    with file_errors("a file of the checkpoint cannot be read"):
        content = file.open("rb")
    with content, file_errors("a file of the checkpoint cannot be read"):
        try:
            return _checked(_MetadataUnpickler(content).load())
        except CheckpointError as error:
            advice = "Do not use a checkpoint that you do not know"
            raise CheckpointError(f"{file} is not read: {error}. {advice}") from None
        except OSError:
            raise
        except Exception as error:  # what a damaged pickle raises can be anything
            raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error


def _checked(metadata: Any) -> Metadata:
    """Raise CheckpointError for what should not be there, anything else for what is damaged."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise TypeError(f"expected the metadata of tensors, got {type(metadata).__name__}")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):  # torch would unpickle it without a question
            raise CheckpointError(f"{str(key)[:200]} is no tensor there")
        _check_entry(key, entry)
        for piece in entry.chunks:
            _check_place(metadata.storage_data[MetadataIndex(key, piece.offsets)])
    for place in metadata.storage_data.values():
        _check_place(place)
    return metadata


def _check_entry(key: object, entry: TensorStorageMetadata) -> None:
    shapes: list[Any] = [entry.size]
    for piece in entry.chunks:
        if not isinstance(piece, ChunkStorageMetadata):
            raise TypeError(f"expected a piece of {str(key)[:200]}, got {type(piece).__name__}")
        shapes += [piece.offsets, piece.sizes]
    well_formed = (
        isinstance(key, str)
        and isinstance(entry.properties, TensorProperties)
        and isinstance(entry.properties.dtype, torch.dtype)
        and all(isinstance(shape, torch.Size) and len(shape) == len(entry.size) for shape in shapes)
    )
    if not well_formed:
        raise TypeError(f"expected the sizes of {str(key)[:200]} and of its pieces")


def _check_place(place: Any) -> None:
    name = place.relative_path
    if not _is_file_name(name) or place.transform_descriptors:
        raise CheckpointError(f"it names the file {name!r}, expected one in its own folder, as it is")
    if not (type(place.offset) is type(place.length) is int and min(place.offset, place.length) >= 0):
        raise TypeError(f"expected the place of a tensor in {name}")


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name
