"""Modules that reduce their own gradients over replicas: once in a step, by the divisor that holds for all."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

__all__ = ["GradientSync", "needs_declared_shapes", "unwrapped"]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module in a ``DistributedDataParallel``, whose gradients are then reduced as those of any other."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def needs_declared_shapes(module: nn.Module) -> bool:
    """True with parts of ``fully_shard``: their hooks gather parameters, which fake tensors cannot stand in for."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


class GradientSync:
    """Tells the parts of a chunk that ``fully_shard`` made when to reduce: with the last backward of a step alone.

    They divide by ``replicas``, the number of the edge's, since each backward begins at a loss that is divided by the
    number of microbatches of one of those.
    """

    def __init__(self, module: nn.Module, replicas: int) -> None:
        self._parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for part in self._parts:
            part.set_gradient_divide_factor(float(replicas))
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale within a sum

    def set_last(self, last: bool) -> None:
        """Before each backward: whether it is the last of the step."""
        for part in self._parts:
            part.set_requires_gradient_sync(last, recurse=False)
            part.set_is_last_backward(last)
