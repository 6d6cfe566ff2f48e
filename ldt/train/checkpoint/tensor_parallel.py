"""Wraps the plain local weights of Megatron-style layers as shards of whole tensors."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard

from ldt.errors import CheckpointError
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.module_state import is_tensor_parallel

__all__ = ["as_shard"]


def as_shard(tensor: torch.Tensor, parameter: torch.Tensor, mesh: Mesh, name: str) -> torch.Tensor:
    """Return the DTensor that ``tensor`` is this rank's part of, in the same memory; ``tensor`` itself if it is whole.

    It is a part if ``parameter``, whose value or optimizer state it is, is marked ``tensor_model_parallel``. The ranks
    of the node then hold equal parts of dimension ``partition_dim``, in rank order. Raises CheckpointError with its
    ``name`` for any other partition.
    """
    parts = mesh.topology.tp[mesh.stage]
    if parts == 1 or not is_tensor_parallel(parameter) or tensor.shape != parameter.shape:
        return tensor
    dim, stride = getattr(parameter, "partition_dim", None), getattr(parameter, "partition_stride", 1)
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim() or stride != 1:
        raise CheckpointError(
            f"{name} is marked tensor_model_parallel with partition_dim {dim} and partition_stride {stride}: a "
            f"checkpoint supports parts of one of its {tensor.dim()} dimensions with stride 1; make it a DTensor"
        )
    shape = list(tensor.shape)
    shape[dim] *= parts
    whole = torch.empty(shape, device="meta")
    placements = [Shard(dim % tensor.dim())]
    return DTensor.from_local(
        tensor.detach(), mesh.tp_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
