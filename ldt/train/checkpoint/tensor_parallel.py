"""Weights that Megatron-style layers cut by themselves, plain tensors on each rank, as shards of the whole."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard

from ldt.errors import CheckpointError
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.module_state import is_tensor_parallel

__all__ = ["as_shard"]


def as_shard(tensor: torch.Tensor, parameter: torch.Tensor, mesh: Mesh, name: str) -> torch.Tensor:
    """``tensor`` as the DTensor that it is this rank's part of, in the same memory; itself if it is whole.

    It is a part where ``parameter``, whose value or optimizer state it is, is marked ``tensor_model_parallel``: then
    ranks of the node have equal parts of dimension ``partition_dim``, in their order. Raises CheckpointError, with its
    ``name``, for parts that are cut otherwise.
    """
    parts = mesh.topology.tp[mesh.stage]
    if parts == 1 or not is_tensor_parallel(parameter) or tensor.shape != parameter.shape:
        return tensor
    dim, stride = getattr(parameter, "partition_dim", None), getattr(parameter, "partition_stride", 1)
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim() or stride != 1:
        raise CheckpointError(
            f"{name} is marked tensor_model_parallel with partition_dim {dim} and partition_stride {stride}: a "
            f"checkpoint takes parts of one of its {tensor.dim()} dimensions, and a stride of 1; make it a DTensor"
        )
    shape = list(tensor.shape)
    shape[dim] *= parts
    whole = torch.empty(shape, device="meta")
    placements = [Shard(dim % tensor.dim())]
    return DTensor.from_local(
        tensor.detach(), mesh.tp_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
