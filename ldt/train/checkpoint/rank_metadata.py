"""Reads the metadata of a rank's tensors. Files on a cloud's disk are untrusted: nothing in them can run code."""

from __future__ import annotations

import dataclasses
import io
import math
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
from ldt.train.checkpoint.files import damaged
from ldt.train.checkpoint.layout import StorageError

__all__ = ["FILE", "parse_metadata", "pieces_in"]

FILE = ".metadata"
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


_Unpickler: Any = pickle._Unpickler  # the one in Python, which lets us check each instruction


class _MetadataUnpickler(_Unpickler):  # type: ignore[misc]
    """Allows only the classes that the metadata of tensors consists of, and changes only objects of them."""

    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def load_build(self) -> None:
        """Set the state of an object. For a class or an enum member that would change the whole process."""
        target = self.stack[-2]
        if not dataclasses.is_dataclass(target) or isinstance(target, type):
            raise CheckpointError(
                f"it would change a {type(target).__name__}, which is not an object of the metadata of tensors"
            )
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def load_setitem(self) -> None:
        """Set an item of a dict. Hashing a key of another type could take for ever."""
        _check_key(self.stack[-2])
        super().load_setitem()

    dispatch[pickle.SETITEM[0]] = load_setitem

    def load_setitems(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        super().load_setitems()

    dispatch[pickle.SETITEMS[0]] = load_setitems

    def load_dict(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        super().load_dict()

    dispatch[pickle.DICT[0]] = load_dict
    for instruction in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8):
        del dispatch[instruction[0]]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"it refers to {module}.{name}, which is not allowed in the metadata of tensors"
        )


def parse_metadata(file: Path, data: bytes) -> Metadata:
    """Parse the metadata of torch.distributed.checkpoint in ``file``: only tensors, with all pieces in its folder.

    Raises CheckpointError naming the file if it is damaged or contains anything else.
    """
    try:
        return _checked(_MetadataUnpickler(io.BytesIO(data)).load())
    except CheckpointError as error:
        advice = "Do not load a checkpoint from an untrusted source"
        raise StorageError.of(file, f"is refused: {error}. {advice}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise damaged(file, f"{type(error).__name__}: {str(error)[:200]}") from error


def pieces_in(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """Offset and length of the pieces of tensors that this rank has just written to ``folder``, by file name."""
    file = folder / FILE
    found: dict[str, list[tuple[int, int]]] = {}
    for piece in parse_metadata(file, file.read_bytes()).storage_data.values():
        found.setdefault(piece.relative_path, []).append((piece.offset, piece.length))
    return found


def _check_key(key: object) -> None:
    parts = (key.fqn, key.offset, key.index) if type(key) is MetadataIndex else (key,)
    if not all(part is None or type(part) in (str, int, torch.Size) for part in parts):
        raise TypeError(f"expected a name as a key, got a {type(key).__name__}")


def _checked(metadata: Any) -> Metadata:
    """Raise CheckpointError for forbidden contents, any other exception for damaged ones."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise TypeError(f"expected the metadata of tensors, got {type(metadata).__name__}")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):  # torch would unpickle it without any check
            raise CheckpointError(f"{str(key)[:200]} is not a tensor")
        _check_entry(key, entry)
        for piece in entry.chunks:
            storage = metadata.storage_data[MetadataIndex(key, piece.offsets)]
            _check_storage(storage)
            if math.prod(piece.sizes) * entry.properties.dtype.itemsize > storage.length:
                raise ValueError(f"{key[:200]} has more elements than fit in its file")
    for storage in metadata.storage_data.values():
        _check_storage(storage)
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
        and all(number >= 0 for shape in shapes for number in shape)
    )
    if not well_formed:
        raise TypeError(f"expected the sizes of {str(key)[:200]} and of its pieces")


def _check_storage(storage: Any) -> None:
    name = storage.relative_path
    if not isinstance(name, str):
        raise TypeError(f"expected the name of a file, got a {type(name).__name__}")
    if name in ("", "..") or Path(name).name != name or storage.transform_descriptors:
        raise CheckpointError(
            f"it names the file {name[:200]!r}, expected one in its own folder, untransformed"
        )
    if not (type(storage.offset) is type(storage.length) is int and min(storage.offset, storage.length) >= 0):
        raise TypeError(f"expected the offset and length of a tensor in {name}")
