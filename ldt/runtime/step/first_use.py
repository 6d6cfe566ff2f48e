"""Finds calls in which libraries may load kernels on a device."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch

from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec
from ldt.runtime.step.metadata import StepMessage
from ldt.topology import Topology

__all__ = ["MOST", "FirstUse"]

MOST = 16  # calls: a job whose shapes always differ would otherwise never overlap transfers with compute


class FirstUse:
    """Tells which calls have microbatches of new shapes, on a device.

    A library such as cuBLAS or cuDNN loads a kernel at its first launch, whatever CUDA_MODULE_LOADING says, and that
    waits for everything queued on the device. Behind a receive that waits for a result of this rank it would never end.
    Which kernels run depends on the shapes. After ``MOST`` such calls all others are taken for known, and so are all
    calls on the CPU.

    Ranks answer alike, as they go by what all of them know of a call.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._served = topology.served
        self._left = MOST if device.type != "cpu" and topology.channels else 0
        self._seen: set[Hashable] = set()

    def has_new_shapes(
        self, training: bool, of_edges: Sequence[tuple[Sequence[Sequence[HopSpecs]], StepMessage]]
    ) -> bool:
        """Whether the call has. ``of_edges`` has the specs of hops and the message of every edge replica."""
        if not self._left:
            return False
        shapes = zip(*(_shapes(*of_edge) for of_edge in of_edges), strict=True)
        # Each cloud replica loads for itself.
        found = {(training, index % self._served, each) for index, each in enumerate(shapes)}
        is_new = not found <= self._seen
        self._seen |= found
        self._left -= is_new
        return is_new


def _shapes(hops: Sequence[Sequence[HopSpecs]], message: StepMessage) -> Iterator[Hashable]:
    """Yield what kernels may depend on, for each microbatch of an edge replica."""
    for specs, microbatch in zip(hops, message.microbatches, strict=True):
        metadata = sorted(microbatch.tensors.items())
        yield tuple(specs), tuple((name, TensorSpec.of(tensor)) for name, tensor in metadata)
