"""Advises compression where autocast computes in bfloat16 and hops between sites carry float32 all the same."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ldt.runtime.common.kept import sent_specs
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.mesh.mesh import Mesh

__all__ = ["CompressionAdvice"]

logger = logging.getLogger(__name__)


class CompressionAdvice:
    """Logs a warning for each such hop, once, on the leader of the edge."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._logged: set[int] = set()

    def check(self, hops: Sequence[HopSpecs], autocast: str | None) -> None:
        """``hops`` are those of a microbatch, ``autocast`` is the name of its dtype, None if it is off."""
        mesh, topology = self._mesh, self._mesh.topology
        if autocast != "bfloat16" or not (mesh.is_edge and mesh.is_leader):
            return
        for hop, specs in enumerate(hops):
            sent = enumerate(sent_specs(specs))
            wide = [i for i, spec in sent if spec.requires_grad and spec.dtype == torch.float32]
            if hop in self._logged or not wide:
                continue
            channel = topology.channel(hop, "F", 0)
            if not topology.is_local(channel) and mesh.compressions.scheme(channel) == "none":
                self._logged.add(hop)
                logger.warning(
                    "hop %d->%d carries float32 under bfloat16 autocast (tensors %s, such as a LayerNorm's output): "
                    'connect(compression="bf16") would halve it',
                    hop,
                    hop + 1,
                    ", ".join(map(str, wide)),
                )
