"""Divides a stage's tensors among its ranks, writes each rank's part, and merges the parts' metadata.

Ranks do not write one checkpoint together, because torch.distributed.checkpoint would send pickles between them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from ldt._torch_private import validate_global_plan
from ldt.runtime.common.rank_info import RankInfo
from ldt.topology import Node
from ldt.train.checkpoint.files import damaged

__all__ = ["merge_metadata", "tensors_of_rank", "write_tensors"]

_SEVERAL = [SavePlan([])] * 2  # torch only checks for gaps if there are several plans


def tensors_of_rank(rank_info: RankInfo, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The ``tensors`` of a stage that this rank writes, so that each element is written once.

    The first rank of the stage writes plain tensors. A DTensor is written by the ranks of the device mesh that contains
    that first rank: each shard by the first rank that holds it.
    """
    return {key: tensor for key, tensor in tensors.items() if _writes(rank_info, tensor)}


def _writes(rank_info: RankInfo, tensor: torch.Tensor) -> bool:
    first = rank_info.ranks[rank_info.topology.leader_of(Node(rank_info.stage, 0))]
    if not isinstance(tensor, DTensor):
        return rank_info.global_rank == first
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or first not in tensor.device_mesh.mesh.flatten().tolist():
        return False
    if tensor.numel() == 0:
        return not any(coordinate)
    # is_shard() is False for a strided shard.
    repeated = [placement.is_replicate() or placement.is_partial() for placement in tensor.placements]
    is_first = not any(index for index, same in zip(coordinate, repeated, strict=True) if same)
    return is_first and tensor.to_local().numel() > 0


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write ``tensors`` (of a DTensor its local shard) to ``folder``, without communication. Raises OSError."""
    # No copy-ahead: it would use the current accelerator, not the mesh's device.
    writer = FileSystemWriter(folder, overwrite=False, per_thread_copy_ahead=0)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(dict(tensors), storage_writer=writer, no_dist=True)
    except CheckpointException as error:  # a BaseException
        raise next((cause for cause, _ in error.failures.values()), error) from None


def merge_metadata(folder: Path, parts: Mapping[str, Metadata]) -> Metadata:
    """Merge the metadata of the subfolders of ``folder`` into that of the whole stage.

    Raises CheckpointError naming a tensor if sizes or dtypes differ between ranks, or if its elements are not all
    written exactly once.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    files: dict[Any, Any] = {}
    for name, part in parts.items():
        for key, entry in part.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            known = tensors.setdefault(key, dataclasses.replace(entry, chunks=[]))
            if _kind(known) != _kind(entry):
                raise damaged(
                    folder,
                    f"{key} is {_kind(entry)} in {name}, and {_kind(known)} in the parts of other ranks",
                )
            known.chunks.extend(entry.chunks)
        for index, info in part.storage_data.items():
            files[index] = dataclasses.replace(info, relative_path=f"{name}/{info.relative_path}")
    for key, entry in tensors.items():
        if len(entry.chunks) > len(parts):  # torch compares all pairs of pieces
            raise damaged(folder, f"{key} has {len(entry.chunks)} pieces, expected at most one per rank")
        _check_whole(folder, key, entry)
    entries: dict[str, STORAGE_TYPES] = {**tensors}
    return Metadata(entries, storage_data=files)


def _kind(entry: TensorStorageMetadata) -> tuple[list[int], torch.dtype, torch.layout]:
    return list(entry.size), entry.properties.dtype, entry.properties.layout


def _check_whole(folder: Path, key: str, entry: TensorStorageMetadata) -> None:
    errors = validate_global_plan(_SEVERAL, Metadata({key: entry}))
    if not entry.size and len(entry.chunks) != 1:  # torch does not check tensors without dimensions
        errors.append(f"it has no dimensions, and {len(entry.chunks)} pieces")
    if errors:
        raise damaged(folder, f"the parts of its ranks do not have each element of {key} once: {errors[0]}")
