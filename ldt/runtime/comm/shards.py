"""Tensors of a hop that are split over the ranks of a stage: DTensors there, each rank's own part on the wire.

A chunk that returns a DTensor which is ``Shard(d)`` over ``mesh.tp_mesh`` sends its parts as they are, and the next
chunk gets a DTensor that is ``Shard(d)`` over its own ranks, of however many there are; gradients come back likewise.
Parts are those of ``torch.chunk``, as everywhere in DTensor: of n rows on k ranks, ceil(n / k) each, as long as there
are any.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ldt._torch_private import AsyncCollectiveTensor, local_tensor
from ldt.errors import LdtError
from ldt.runtime.common.chunk_outputs import check_sendable
from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec

__all__ = ["NodeShards", "Span", "overlap", "overlapping", "span_of"]


class Span(NamedTuple):
    """Indices ``start`` to ``stop`` of a dimension."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def span_of(size: int, place: int, parts: int) -> Span:
    """What the rank at ``place`` has of a dimension of ``size`` that is split into ``parts``."""
    share = math.ceil(size / parts)
    return Span(min(size, place * share), min(size, (place + 1) * share))


@functools.cache
def overlapping(sources: int, targets: int) -> tuple[tuple[int, int], ...]:
    """The places that have something in common of a dimension of any size that is split into so many parts.

    Sizes up to the product show all pairs (tested against longer ones); even splits alone would miss some.
    """
    pairs = set()
    for size in range(1, sources * targets + 1):
        spans = [[span_of(size, place, parts) for place in range(parts)] for parts in (sources, targets)]
        for (source, mine), (target, theirs) in itertools.product(*map(enumerate, spans)):
            if max(mine.start, theirs.start) < min(mine.stop, theirs.stop):
                pairs.add((source, target))
    return tuple(sorted(pairs))


def overlap(part: torch.Tensor, dim: int, mine: Span, theirs: Span) -> torch.Tensor:
    """The view of ``part``, which has ``mine`` of ``dim``, that is in ``theirs``, too."""
    start = max(mine.start, min(mine.stop, theirs.start))
    stop = max(start, min(mine.stop, theirs.stop))
    return part.narrow(dim, start - mine.start, stop - start)


@dataclass(frozen=True)
class NodeShards:
    """This rank's parts of what is split over its node: its ``place`` among the ``parts``, and their device mesh."""

    place: int = 0
    parts: int = 1
    mesh: Callable[[], DeviceMesh] | None = None

    def specs_of(self, tensors: Sequence[torch.Tensor], what: str) -> HopSpecs:
        """The specs of tensors that are to cross to another node.

        Raises TypeError, naming them as ``what``, for one that has no memory of its own to send: a wrapper of others
        that is not split over this node.
        """
        return tuple(self._spec_of(tensor, f"{what}, tensor {i}") for i, tensor in enumerate(tensors))

    def local_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The shape of this rank's part, in the order of memory."""
        if spec.shard is None:
            return spec.wire_shape
        mine = len(span_of(spec.shape[spec.shard], self.place, self.parts))
        return (*spec.shape[: spec.shard], mine, *spec.shape[spec.shard + 1 :])

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a DTensor, differentiably: the gradient that comes back is split alike. Others as is."""
        if not isinstance(tensor, DTensor):
            return tensor
        part = tensor.to_local(grad_placements=tensor.placements)
        # What an asynchronous redistribution gives is waited for by whatever reads it.
        return part.clone() if isinstance(part, AsyncCollectiveTensor) else part

    def whole(self, part: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """The DTensor of which ``part`` is this rank's; ``part`` itself if the spec says that it is all."""
        if spec.shard is None:
            return part
        assert self.mesh is not None
        shape = torch.Size(spec.shape)
        stride = torch.empty(shape, device="meta").stride()
        placements = [Shard(spec.shard)]
        return DTensor.from_local(part, self.mesh(), placements, run_check=False, shape=shape, stride=stride)

    def _spec_of(self, tensor: torch.Tensor, what: str) -> TensorSpec:
        if isinstance(tensor, DTensor) and self._is_split_here(tensor):
            (placement,) = tensor.placements
            assert isinstance(placement, Shard)
            spec = replace(TensorSpec.of(tensor), order=(), shard=placement.dim % tensor.dim())
            self._check_part(tuple(local_tensor(tensor).shape), spec, what)
            return spec
        check_sendable(tensor, what)
        return TensorSpec.of(tensor)

    def _check_part(self, part: tuple[int, ...], spec: TensorSpec, what: str) -> None:
        """Raise LdtError if this rank has another part than others take for it: ``from_local`` believes anything."""
        if part != self.local_shape(spec):
            raise LdtError(
                f"{what} is a DTensor of {list(spec.shape)} that is split over {self.parts} ranks in dimension "
                f"{spec.shard}: the part of rank {self.place} is {list(self.local_shape(spec))}, as torch.chunk cuts, "
                f"but it has {list(part)}. Make it with distribute_tensor or redistribute, or give DTensor.from_local "
                "the right part and shape"
            )

    def _is_split_here(self, tensor: DTensor) -> bool:
        of_one_dimension = len(tensor.placements) == 1 and type(tensor.placements[0]) is Shard
        return of_one_dimension and self.mesh is not None and tensor.device_mesh == self.mesh()
