"""Modules that reduce their own gradients over replicas: once in a step, and only where that comes out right."""

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
    "check_groups",
    "check_sharded_alike",
    "is_fully_sharded",
    "sharding_of",
    "unwrapped",
]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module in a ``DistributedDataParallel``, whose gradients are then reduced as those of any other."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def is_fully_sharded(module: nn.Module) -> bool:
    """True with parts of ``fully_shard``, whose hooks gather parameters from all replicas.

    Fake tensors cannot stand in for those, and replicas must run such chunks in one order.
    """
    return bool(_sharded_parts(module))


def sharding_of(modules: Mapping[int, nn.Module]) -> dict[str, list[str]]:
    """The parts of each chunk that ``fully_shard`` made, by name; of chunks that have any."""
    found = {
        str(index): [name for name, part in module.named_modules() if isinstance(part, FSDPModule)]
        for index, module in modules.items()
    }
    return {index: names for index, names in found.items() if names}


def check_sharded_alike(rank_info: RankInfo, shardings: Sequence[Mapping[str, list[str]]]) -> set[int]:
    """The stages that have such parts, given ``sharding_of`` of every rank, by rank of the topology.

    Raises LdtError if ranks of one stage have other parts: they would wait for each other in vain.
    """
    stages = [rank_info.topology.node_of(rank).stage for rank in range(len(shardings))]
    for rank, sharding in enumerate(shardings):
        first = stages.index(stages[rank])
        if sharding != shardings[first]:
            raise LdtError(
                f"all ranks of a stage must call fully_shard on the same modules of a chunk: of stage {stages[rank]}, "
                f"rank {rank_info.ranks[first]} did on {shardings[first] or 'none'}, rank {rank_info.ranks[rank]} on "
                f"{sharding or 'none'} (names by chunk)"
            )
    return {stage for stage, sharding in zip(stages, shardings, strict=True) if sharding}


def check_groups(where: str, module: nn.Module, rank_info: RankInfo) -> None:
    """Raise ValueError where the module in ``where`` would talk to ranks that run something else."""
    _check_sharded(module, rank_info)
    _check_batch_norms(where, module, rank_info)


def _check_sharded(module: nn.Module, rank_info: RankInfo) -> None:
    """Parts of ``fully_shard`` would divide by a wrong number."""
    parts = _sharded_parts(module)
    for mesh in (p.device_mesh for part in parts for p in part.parameters() if isinstance(p, DTensor)):
        if mesh.ndim == 1 and rank_info.spans_node(mesh) and not rank_info.spans_replicas(mesh):
            raise InputValueError(
                f"fully_shard must go over the replicas, ranks {list(rank_info.replica_ranks)}, got a mesh of ranks "
                f"{mesh.mesh.tolist()}, which are of one stage and see the same microbatches: use mesh.dp_mesh"
            )


def _check_batch_norms(where: str, module: nn.Module, rank_info: RankInfo) -> None:
    """A batch norm would wait for ranks of other nodes, which are at other actions of the plan."""
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm) and dist.is_initialized():
            ranks = dist.get_process_group_ranks(part.process_group or dist.group.WORLD)
            if not set(ranks) <= set(rank_info.node_ranks):
                raise InputValueError(
                    f"{where}: {name or 'it'} is a SyncBatchNorm over ranks {ranks}, which run other chunks or other "
                    "microbatches, so that its forward would wait for them in vain: take BatchNorm, whose running "
                    "statistics replicas get from the first, or process_group=mesh.tp_mesh.get_group()"
                )


def _sharded_parts(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


class GradientSync:
    """Tells the parts of a chunk that ``fully_shard`` made to reduce with the last backward of a step alone.

    They divide the sum over replicas by their number, unless ``divisor`` says otherwise: replicas that share one of
    the edge have shares of its microbatches, so that their gradients add up.
    """

    def __init__(self, module: nn.Module, divisor: int | None = None) -> None:
        self._parts = _sharded_parts(module)
        if divisor is not None:
            for part in self._parts:
                part.set_gradient_divide_factor(float(divisor))
                part.set_force_sum_reduction_for_comms(True)  # gloo has no sums that are scaled on the way

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
