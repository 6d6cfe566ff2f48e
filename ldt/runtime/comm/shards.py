"""Sharded tensors of a hop: DTensors in the chunks, each rank's own part on the wire.

A chunk that returns a DTensor with ``Shard(d)`` over ``mesh.tp_mesh`` sends the parts as they are. The next chunk gets
a DTensor with ``Shard(d)`` over its own ranks, however many there are. Gradients come back the same way. DTensor cuts
parts as ``torch.chunk`` does: of n rows on k ranks, each rank gets ceil(n / k) until none are left.
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


def span_of(size: int, index: int, parts: int) -> Span:
    """Part ``index`` of a dimension of ``size`` that is split into ``parts``."""
    share = math.ceil(size / parts)
    return Span(min(size, index * share), min(size, (index + 1) * share))


@functools.cache
def overlapping(sources: int, targets: int) -> tuple[tuple[int, int], ...]:
    """The (source, target) pairs whose parts overlap for some size, split into ``sources`` and ``targets`` parts.

    Sizes up to the product give all pairs (tested against larger ones). Even splits alone would miss some.
    """
    pairs = set()
    for size in range(1, sources * targets + 1):
        spans = [[span_of(size, index, parts) for index in range(parts)] for parts in (sources, targets)]
        for (source, sent), (target, received) in itertools.product(*map(enumerate, spans)):
            if max(sent.start, received.start) < min(sent.stop, received.stop):
                pairs.add((source, target))
    return tuple(sorted(pairs))


def overlap(part: torch.Tensor, dim: int, local: Span, remote: Span) -> torch.Tensor:
    """The view of ``part``, which spans ``local`` of ``dim``, that ``remote`` includes, too."""
    start = max(local.start, min(local.stop, remote.start))
    stop = max(start, min(local.stop, remote.stop))
    return part.narrow(dim, start - local.start, stop - start)


@dataclass(frozen=True)
class NodeShards:
    """Converts between sharded tensors and this rank's parts. ``mesh`` gives the device mesh of the node's ranks."""

    tp_rank: int = 0
    tp_size: int = 1
    mesh: Callable[[], DeviceMesh] | None = None

    def specs_of(self, tensors: Sequence[torch.Tensor], what: str) -> HopSpecs:
        """The specs of tensors about to be sent to another node.

        Raises TypeError, naming the tensor with ``what``, for one without plain memory to send: a wrapper subclass
        that is not sharded over this node.
        """
        return tuple(self._spec_of(tensor, f"{what}, tensor {i}") for i, tensor in enumerate(tensors))

    def local_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The shape of this rank's part, in memory order."""
        if spec.shard is None:
            return spec.wire_shape
        length = len(span_of(spec.shape[spec.shard], self.tp_rank, self.tp_size))
        return (*spec.shape[: spec.shard], length, *spec.shape[spec.shard + 1 :])

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a DTensor, or ``tensor`` if it is plain. Differentiable: gradients are sharded alike."""
        if not isinstance(tensor, DTensor):
            return tensor
        part = tensor.to_local(grad_placements=tensor.placements)
        # clone() waits for an asynchronous redistribution.
        return part.clone() if isinstance(part, AsyncCollectiveTensor) else part

    def whole(self, part: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """The DTensor with ``part`` on this rank, or ``part`` itself if the spec has no shard."""
        if spec.shard is None:
            return part
        assert self.mesh is not None
        shape = torch.Size(spec.shape)
        stride = torch.empty(shape, device="meta").stride()
        placements = [Shard(spec.shard)]
        return DTensor.from_local(part, self.mesh(), placements, run_check=False, shape=shape, stride=stride)

    def _spec_of(self, tensor: torch.Tensor, what: str) -> TensorSpec:
        if isinstance(tensor, DTensor) and self._is_sharded_here(tensor):
            (placement,) = tensor.placements
            assert isinstance(placement, Shard)
            spec = replace(TensorSpec.of(tensor), order=(), shard=placement.dim % tensor.dim())
            self._check_part(tuple(local_tensor(tensor).shape), spec, what)
            return spec
        check_sendable(tensor, what)
        return TensorSpec.of(tensor)

    def _check_part(self, part: tuple[int, ...], spec: TensorSpec, what: str) -> None:
        """Raise LdtError unless this rank's part has the shape that its peers expect: ``from_local`` checks nothing."""
        if part != self.local_shape(spec):
            raise LdtError(
                f"{what} is a DTensor of {list(spec.shape)} sharded over {self.tp_size} ranks in dimension "
                f"{spec.shard}: rank {self.tp_rank} must have a part of {list(self.local_shape(spec))}, as torch.chunk "
                f"cuts it, but has {list(part)}. Create it with distribute_tensor or redistribute, or pass "
                "DTensor.from_local the right part and shape"
            )

    def _is_sharded_here(self, tensor: DTensor) -> bool:
        is_shard = len(tensor.placements) == 1 and type(tensor.placements[0]) is Shard
        return is_shard and self.mesh is not None and tensor.device_mesh == self.mesh()
