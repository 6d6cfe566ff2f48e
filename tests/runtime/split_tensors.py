"""Converts between a tensor split over the ranks of a stage, this rank's part of it, and the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import ldt
from ldt.testing import toy_loss, toy_microbatches
from ldt.topology import Topology


def split(tensor: Tensor, mesh: ldt.Mesh, dim: int) -> Tensor:
    return DTensor.from_local(tensor, mesh.tp_mesh, [Replicate()]).redistribute(placements=[Shard(dim)])


def part_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, whole: Tensor) -> Tensor:
    """Return the tensor of which ``part`` is this rank's, if ``whole`` is split."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
    )


def gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def seeded(make: Callable[[ldt.Mesh, int], nn.Module], mesh: ldt.Mesh, chunk: int) -> nn.Module:
    """Seed a chunk so that all ranks that build it have equal weights."""
    torch.manual_seed(chunk)
    return make(mesh, chunk)


def step_error(topology: Topology, make: Callable[[ldt.Mesh, int], nn.Module], **options: Any) -> str:
    """Return the error of building and stepping a pipeline of ``make(mesh, chunk)``; empty if none."""
    with ldt.connect(topology, ranks=range(topology.world_size), **options) as mesh:
        try:
            mine = [seeded(make, mesh, chunk) for chunk in topology.chunks_of(mesh.stage)]
            pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss)
            pipeline.step(toy_microbatches(2, batch=7) if mesh.is_edge else None)
        except ldt.LdtError as error:
            return str(error)
    return ""
