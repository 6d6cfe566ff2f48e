"""The unsplit model that rounds where a link with compression does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ldt.runtime.comm.compression import (
    Compression,
    CompressionChoice,
    Compressions,
    Scheme,
    pack,
    packs,
    unpack,
)
from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.topology import Topology

__all__ = ["with_rounding"]


def with_rounding(
    topology: Topology, chunks: Sequence[nn.Module], choice: CompressionChoice
) -> list[nn.Module]:
    """The ``chunks`` of the whole model; those before a hop with compression pack and unpack what they return.

    A message is packed as a whole: shares and pieces that several ranks send are not imitated.
    """
    compressions = Compressions.of(topology, choice, torch.device("cpu"))

    def of_hop(hop: int) -> Compression:
        forward, backward = (compressions.scheme(topology.channel(hop, way, 0)) for way in ("F", "B"))
        return Compression(forward, backward)

    return [*(_Rounding(chunk, of_hop(hop)) for hop, chunk in enumerate(chunks[:-1])), chunks[-1]]


class _Rounding(nn.Module):
    def __init__(self, chunk: nn.Module, compression: Compression) -> None:
        super().__init__()
        self.chunk, self.compression = chunk, compression

    def forward(self, *args: Any) -> Any:
        output = self.chunk(*args)
        return tuple(map(self._cross, output)) if isinstance(output, tuple) else self._cross(output)

    def _cross(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        crossed: torch.Tensor = _Crossing.apply(tensor, self.compression)  # type: ignore[no-untyped-call]
        return crossed


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, compression: Compression) -> torch.Tensor:
        ctx.compression, ctx.spec = compression, replace(TensorSpec.of(x), requires_grad=True)
        return _rounded(compression.activations, x, ctx.spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _rounded(ctx.compression.gradients, grad, ctx.spec), None


def _rounded(scheme: Scheme, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """What arrives of a tensor of ``spec``, or of its gradient."""
    if not packs(scheme, spec):
        return tensor
    wire = spec.to_wire(tensor)
    arrived = torch.empty_like(wire, memory_format=torch.contiguous_format)
    unpack(scheme, pack(scheme, wire), arrived)
    return spec.from_wire(arrived)
