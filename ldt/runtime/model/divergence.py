"""Detects ranks of a stage whose outputs differ although only one of them, or a share of each, is sent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from ldt.errors import LdtError
from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.digests import digests
from ldt.topology import Direction

__all__ = ["DivergenceCheck"]

_MOST_CHECKED = 64  # kinds of messages per chunk and direction
_PROJECTIONS = 8
_PIECE = 1 << 17


class DivergenceCheck:
    """Compares a chunk's outgoing tensors between the ranks of this node, once per kind of message.

    The leader sends a whole tensor, or all ranks send a share of it. If the ranks hold different tensors, as when each
    keeps a part of the sequence, the next stage would compute with a mixture. Rounding does not count: random sign
    projections estimate the distance of two tensors. DTensors are skipped, and so are links on which each rank sends
    its own tensor.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._seen: set[tuple[int, Direction, HopSpecs]] = set()
        self._checked: Counter[tuple[int, Direction]] = Counter()

    def check(
        self, hop: int, direction: Direction, specs: HopSpecs, tensors: Sequence[torch.Tensor], what: str
    ) -> None:
        """Raise LdtError on all ranks of the node if they are about to send different ``tensors`` over ``hop``.

        Either all ranks of the node communicate here or none: they send the same messages in the same order.
        """
        key = (hop, direction, specs)
        if (
            key in self._seen
            or self._checked[hop, direction] == _MOST_CHECKED
            or not self._is_shared(hop, direction)
        ):
            return
        self._seen.add(key)
        self._checked[hop, direction] += 1
        whole = [index for index, spec in enumerate(specs) if spec.shard is None and spec.nbytes]
        if not whole:
            return
        local = torch.stack([_sketch(tensors[index]) for index in whole])
        found = torch.stack(self._mesh.control.all_gather_in_node(local, f"the checksums of the {what}"))
        for index, of_ranks in zip(whole, found.unbind(1), strict=True):
            self._compare(of_ranks, specs[index], f"{what}, tensor {index}")

    def _is_shared(self, hop: int, direction: Direction) -> bool:
        """Whether one rank's tensors stand for those of all ranks of the node."""
        channel = self._mesh.topology.channel(hop, direction, 0)
        sources, targets = self._mesh.transfers.sizes(channel)
        return sources > 1 and not (self._mesh.transfers.mode(channel) == "direct" and sources == targets)

    def _compare(self, of_ranks: torch.Tensor, spec: TensorSpec, what: str) -> None:
        distances = [_distance(of_ranks[0], other) for other in of_ranks]
        allowed = math.sqrt(torch.finfo(spec.dtype).eps) if _is_continuous(spec.dtype) else 0.0
        ranks = self._mesh.rank_info.node_ranks
        others = [rank for rank, distance in zip(ranks, distances, strict=True) if not distance <= allowed]
        if others:
            raise LdtError(
                f"{what}, differs between rank {ranks[0]} and ranks {others} of stage {self._mesh.stage}, by "
                f"{max(distances):.2g} times its norm, but the next stage would receive one rank's tensor for all. If "
                "each rank holds a part, return a DTensor that is Shard(d) over mesh.tp_mesh and use "
                'connect(transfer="direct") or "auto"; between stages of equal size "direct" also carries plain '
                "tensors that differ. If all ranks should hold the same tensor, look for a missing all-reduce over the "
                "stage, and for dropout with different random states"
            )


def _is_continuous(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@torch.no_grad()
def _sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Return on the CPU the squared norm and random sign projections; for integers and bools a digest instead."""
    if not _is_continuous(tensor.dtype):
        (digest,) = digests([tensor])
        halves = [float(int(digest[:8], 16)), float(int(digest[8:], 16))]
        return torch.tensor([*halves, *[0.0] * (_PROJECTIONS - 1)], dtype=torch.float64)
    flat = (
        torch.view_as_real(tensor.resolve_conj()).reshape(-1) if tensor.is_complex() else tensor.reshape(-1)
    )
    wide = torch.float64 if flat.device.type in ("cpu", "cuda") else torch.float32
    draw = torch.Generator().manual_seed(0)
    size = min(_PIECE, flat.numel())
    signs = torch.randint(2, (_PROJECTIONS, size), generator=draw).mul_(2).sub_(1).to(flat.device, wide)
    sums = torch.zeros(1 + _PROJECTIONS, dtype=wide, device=flat.device)
    for number, piece in enumerate(torch.split(flat, size)):
        values = piece.to(wide)
        sums[0] += values.square().sum()
        # No matmul: a first one of this kind may wait for receives that are posted ahead of this very output.
        sums[1:] += (signs[:, : len(values)] * values).sum(1) * (1 if number.bit_count() % 2 else -1)
    return sums.double().cpu()


def _distance(first: torch.Tensor, other: torch.Tensor) -> float:
    """Return the distance of two tensors over the larger norm: 0 if equal, infinite if only one is finite."""
    if torch.equal(first, other):
        return 0.0
    finite = [bool(numbers.isfinite().all()) for numbers in (first, other)]
    if not all(finite):
        return math.inf if any(finite) else 0.0
    distance = float((first[1:] - other[1:]).square().mean().sqrt())
    return distance / math.sqrt(max(float(first[0]), float(other[0]), torch.finfo(torch.float64).tiny))
