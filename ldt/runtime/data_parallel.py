"""Modules that reduce their own gradients over replicas: once in a step, and only where that comes out right."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ldt.errors import LdtError
from ldt.runtime.disclosure import InputValueError
from ldt.runtime.place import Place

__all__ = ["GradientSync", "check_sharded", "needs_declared_shapes", "unwrapped"]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module in a ``DistributedDataParallel``, whose gradients are then reduced as those of any other."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def needs_declared_shapes(module: nn.Module) -> bool:
    """True with parts of ``fully_shard``: their hooks gather parameters, which fake tensors cannot stand in for."""
    return bool(_sharded_parts(module))


def check_sharded(module: nn.Module, place: Place) -> None:
    """Raise ValueError where parts of ``fully_shard`` would hang, or divide by a wrong number."""
    parts = _sharded_parts(module)
    if parts and place.topology.served > 1 and not place.is_edge:
        raise InputValueError(
            f"fully_shard gathers parameters on all replicas at once, but stage {place.stage} has "
            f"{place.topology.served} for each one of the edge, with microbatches of their own: leave such chunks "
            "plain, or give edge_dp=dp"
        )
    for mesh in (p.device_mesh for part in parts for p in part.parameters() if isinstance(p, DTensor)):
        if mesh.ndim == 1 and place.spans_node(mesh) and not place.spans_replicas(mesh):
            raise InputValueError(
                f"fully_shard must go over the replicas, ranks {list(place.replica_ranks)}, got a mesh of ranks "
                f"{mesh.mesh.tolist()}, which are of one stage and see the same microbatches: use mesh.dp_mesh"
            )


def _sharded_parts(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


class GradientSync:
    """Tells the parts of a chunk that ``fully_shard`` made to reduce with the last backward of a step alone."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = _sharded_parts(module)

    def set_last(self, last: bool) -> None:
        """Before each backward: whether it is the last of the step."""
        for part in self._parts:
            part.set_requires_gradient_sync(last, recurse=False)
            part.set_is_last_backward(last)

    def refuse_split(self, chunk: int) -> None:
        """Raise LdtError if there are such parts: their hooks do not know of backwards in two parts."""
        if self._parts:
            raise LdtError(
                f"chunk {chunk}: the backward of modules of fully_shard cannot be split: take a plan without split "
                "backward"
            )
