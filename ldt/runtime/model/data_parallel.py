"""Handles modules that reduce their own gradients: fully_shard, DistributedDataParallel and SyncBatchNorm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ldt.errors import LdtError
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.common.redact import InputValueError

__all__ = [
    "GradientSync",
    "check_equal_sharding",
    "check_groups",
    "is_fully_sharded",
    "sharding_of",
    "unwrapped",
]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside a ``DistributedDataParallel``; its gradients are reduced like any other module's."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to ``module`` or a submodule, so that its hooks gather parameters.

    Fake tensors cannot replace gathered parameters, and replicas must run such chunks in the same order.
    """
    return bool(_sharded_parts(module))


def sharding_of(modules: Mapping[int, nn.Module]) -> dict[str, list[str]]:
    """Return by chunk the names of its submodules in ``fully_shard``, for chunks that have any."""
    found = {
        str(index): [name for name, part in module.named_modules() if isinstance(part, FSDPModule)]
        for index, module in modules.items()
    }
    return {index: names for index, names in found.items() if names}


def check_equal_sharding(rank_info: RankInfo, shardings: Sequence[Mapping[str, list[str]]]) -> set[int]:
    """Return the stages that use ``fully_shard``, given every rank's ``sharding_of`` by rank of the topology.

    Raises LdtError if ranks of one stage shard different modules: their collectives would desync.
    """
    stages = [rank_info.topology.node_of(rank).stage for rank in range(len(shardings))]
    for rank, sharding in enumerate(shardings):
        first = stages.index(stages[rank])
        if sharding != shardings[first]:
            raise LdtError(
                f"all ranks of a stage must call fully_shard on the same modules of a chunk: in stage {stages[rank]}, "
                f"rank {rank_info.ranks[first]} called it on {shardings[first] or 'none'}, rank "
                f"{rank_info.ranks[rank]} on {sharding or 'none'} (names by chunk)"
            )
    return {stage for stage, sharding in zip(stages, shardings, strict=True) if sharding}


def check_groups(where: str, module: nn.Module, rank_info: RankInfo) -> None:
    """Raise ValueError if ``module``, called ``where`` in texts, communicates with ranks that run something else."""
    _check_sharded(module, rank_info)
    _check_batch_norms(where, module, rank_info)


def _check_sharded(module: nn.Module, rank_info: RankInfo) -> None:
    """Raise ValueError if ``fully_shard`` spans one node: it would divide gradients by the wrong number."""
    parts = _sharded_parts(module)
    for mesh in (p.device_mesh for part in parts for p in part.parameters() if isinstance(p, DTensor)):
        if mesh.ndim == 1 and rank_info.spans_node(mesh) and not rank_info.spans_replicas(mesh):
            raise InputValueError(
                f"fully_shard must span the replicas, ranks {list(rank_info.replica_ranks)}, got a mesh of ranks "
                f"{mesh.mesh.tolist()}, which belong to one node and see the same microbatches: use mesh.dp_mesh"
            )


def _check_batch_norms(where: str, module: nn.Module, rank_info: RankInfo) -> None:
    """Raise ValueError for a SyncBatchNorm over ranks of other nodes, which are at other actions of the plan."""
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm) and dist.is_initialized():
            ranks = dist.get_process_group_ranks(part.process_group or dist.group.WORLD)
            if not set(ranks) <= set(rank_info.node_ranks):
                raise InputValueError(
                    f"{where}: {name or 'it'} is a SyncBatchNorm over ranks {ranks}, which run other chunks or other "
                    "microbatches, so its forward would deadlock: use BatchNorm, whose running statistics are "
                    "broadcast from the first replica, or process_group=mesh.tp_mesh.get_group()"
                )


def _sharded_parts(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


class GradientSync:
    """Makes the submodules of a chunk in ``fully_shard`` reduce gradients only in the last backward of a step.

    They divide the sum over replicas by the number of replicas, or by ``divisor``. Replicas that share an edge
    replica split its microbatches, so their gradients are summed, not averaged.
    """

    def __init__(self, module: nn.Module, divisor: int | None = None) -> None:
        self._parts = _sharded_parts(module)
        if divisor is not None:
            for part in self._parts:
                part.set_gradient_divide_factor(float(divisor))
                part.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM

    def set_last(self, last: bool) -> None:
        """Declare, before each backward, whether it is the last of the step."""
        for part in self._parts:
            part.set_requires_gradient_sync(last, recurse=False)
            part.set_is_last_backward(last)

    def check_split_backward(self, chunk: int) -> None:
        """Raise LdtError if ``fully_shard`` was used: its hooks do not support a split backward."""
        if self._parts:
            raise LdtError(
                f"chunk {chunk}: the backward of modules in fully_shard cannot be split: use a plan without split "
                "backward"
            )
