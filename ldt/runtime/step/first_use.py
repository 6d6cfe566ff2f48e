"""Lets kernels load where nothing waits on the device for what this rank does next."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch

from ldt.plan import Plan
from ldt.plan.schedules.run_first import run_first
from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec
from ldt.runtime.step.metadata import StepMessage
from ldt.topology import Topology

__all__ = ["FirstUse"]

MOST = 16  # microbatches: a job in which all shapes differ would otherwise run all alone, for ever


class FirstUse:
    """Has microbatches of new shapes run before the others, while no receive is posted ahead.

    A library such as cuBLAS or cuDNN loads a kernel at its first launch, however CUDA was told to load them, and that
    waits for everything queued on the device. Behind a receive that waits for a result of this rank it would never end.
    Which kernels run depends on the shapes, so the first ``MOST`` microbatches of new shapes each run alone, on each
    cloud replica, before the others of their call. On the CPU nothing is changed.

    Ranks decide alike, as they go by what all of them know of a call.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._topology = topology
        self._left = MOST if device.type != "cpu" and topology.channels else 0
        self._seen: set[Hashable] = set()

    def order(self, plan: Plan, of_edges: Sequence[tuple[Sequence[Sequence[HopSpecs]], StepMessage]]) -> Plan:
        """Return the plan to run, for the specs of hops and the message of every edge replica."""
        if not self._left:
            return plan
        shapes = list(zip(*(_shapes(*of_edge) for of_edge in of_edges), strict=True))
        served = self._topology.served
        turns: dict[int, None] = {}
        for index, each in enumerate(shapes):
            key = plan.training, index % served, each  # each cloud replica loads for itself
            if key not in self._seen:
                self._seen.add(key)
                turns[index // served] = None
        first = list(turns)[: self._left]
        self._left -= len(first)
        for turn in reversed(first):
            plan = run_first(plan, range(turn * served, (turn + 1) * served))
        return plan


def _shapes(hops: Sequence[Sequence[HopSpecs]], message: StepMessage) -> Iterator[Hashable]:
    """Yield what kernels may depend on, for each microbatch of an edge replica."""
    for specs, microbatch in zip(hops, message.microbatches, strict=True):
        metadata = sorted(microbatch.tensors.items())
        yield tuple(specs), tuple((name, TensorSpec.of(tensor)) for name, tensor in metadata)
