"""The parts of a stage: what each of its ranks writes, by itself, and whether those of all make whole tensors.

Ranks could also write one checkpoint together, but torch.distributed.checkpoint then sends pickles from rank to rank.
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

__all__ = ["joined", "part_of", "write_tensors"]

_SEVERAL = [SavePlan([])] * 2  # for torch only looks for gaps where several ranks have planned


def part_of(rank_info: RankInfo, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of a stage's ``tensors`` that the rank at ``place`` writes, so that each element is written once.

    A plain tensor is written by the first rank of the stage. A DTensor is written by the ranks of the device mesh that
    has that first rank: by all that hold another shard of it, of those with the same by the one that comes first.
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
    # A strided shard says that it is no shard.
    repeated = [placement.is_replicate() or placement.is_partial() for placement in tensor.placements]
    is_first = not any(index for index, same in zip(coordinate, repeated, strict=True) if same)
    return is_first and tensor.to_local().numel() > 0


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write ``tensors``, of a DTensor its local shard, to ``folder``. Talks to no other rank. Raises OSError."""
    # Copied tensor by tensor, not ahead: that would be on whichever accelerator there is, not the mesh's device.
    writer = FileSystemWriter(folder, overwrite=False, per_thread_copy_ahead=0)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(dict(tensors), storage_writer=writer, no_dist=True)
    except CheckpointException as error:  # a BaseException
        raise next((cause for cause, _ in error.failures.values()), error) from None


def joined(folder: Path, parts: Mapping[str, Metadata]) -> Metadata:
    """The metadata of all tensors of the stage in ``folder``, of those in its subfolders.

    Raises CheckpointError that names a tensor of which ranks have written other sizes or types, or not each element
    once.
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
        if len(entry.chunks) > len(parts):  # torch compares each with each
            raise damaged(folder, f"{key} has {len(entry.chunks)} pieces, expected one of a rank at most")
        _check_whole(folder, key, entry)
    entries: dict[str, STORAGE_TYPES] = {**tensors}
    return Metadata(entries, storage_data=files)


def _kind(entry: TensorStorageMetadata) -> tuple[list[int], torch.dtype, torch.layout]:
    return list(entry.size), entry.properties.dtype, entry.properties.layout


def _check_whole(folder: Path, key: str, entry: TensorStorageMetadata) -> None:
    errors = validate_global_plan(_SEVERAL, Metadata({key: entry}))
    if not entry.size and len(entry.chunks) != 1:  # torch does not look at a tensor without dimensions
        errors.append(f"it has no dimensions, and {len(entry.chunks)} pieces")
    if errors:
        raise damaged(folder, f"the parts of its ranks do not have each element of {key} once: {errors[0]}")
