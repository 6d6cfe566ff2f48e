"""Finds calls in which libraries may load kernels on a device."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import torch

from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec
from ldt.runtime.step.metadata import MicrobatchMetadata, StepMessage
from ldt.topology import Topology

__all__ = ["MOST", "FirstUse"]

logger = logging.getLogger(__name__)

MOST = 16  # calls: a job whose shapes always differ would otherwise never overlap transfers with compute


class FirstUse:
    """Tells which calls have microbatches of new shapes, on a device.

    A library such as cuBLAS or cuDNN loads a kernel at its first launch, whatever CUDA_MODULE_LOADING says, and that
    waits for everything queued on the device. Behind a receive that waits for a result of this rank it would never end.
    Which kernels run depends on the shapes, autocast and modes. After ``MOST`` such calls all others are taken for
    known, and the first of them is logged. On the CPU all are known.

    Ranks answer alike, as they go by what all of them know of a call.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._served = topology.served
        self._waits = device.type != "cpu" and bool(topology.channels)
        self._left = MOST
        self._seen: set[Hashable] = set()

    def forget(self) -> None:
        """Take all shapes for new, as when layers are frozen or unfrozen."""
        self._seen.clear()

    def has_new_shapes(
        self, training: bool, by_edge: Sequence[tuple[Sequence[Sequence[HopSpecs]], StepMessage]]
    ) -> bool:
        """Whether the call has new shapes. ``by_edge`` has the specs of hops and the message of each edge replica."""
        if not self._waits:
            return False
        found = {
            (training, message.setting, edge, index % self._served, *_shapes(specs, microbatch))
            for edge, (hops, message) in enumerate(by_edge)
            for index, (specs, microbatch) in enumerate(zip(hops, message.microbatches, strict=True))
        }
        if found <= self._seen:
            return False
        self._seen |= found
        self._left -= 1
        if self._left < 0:
            self._waits = False
            logger.warning(
                "more than %d calls had microbatches of new shapes: from now on all post their receives ahead, and a "
                "kernel that a library loads for a new shape may wait for them without end; see 'Loading of kernels' "
                "in docs/gpu_notes.md",
                MOST,
            )
        return self._waits


def _shapes(specs: Sequence[HopSpecs], microbatch: MicrobatchMetadata) -> tuple[Hashable, Hashable]:
    """What all ranks know of the shapes of a microbatch."""
    metadata = sorted(microbatch.tensors.items())
    return tuple(specs), tuple((name, TensorSpec.of(tensor)) for name, tensor in metadata)
