"""Whether the ranks of a stage compute the same of what only its first rank, or each a share of, sends."""

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

_LOOKS = 64  # at messages of other shapes, for each chunk and direction
_PROJECTIONS = 8
_PIECE = 1 << 17


class DivergenceCheck:
    """Compares what leaves a chunk on the ranks of this node, for each kind of message the first time.

    Whole tensors are sent by the leader, or in shares by all: if ranks have others, as where layers keep a part of the
    sequence each, the next stage would compute with a mixture. Rounding is not a difference: sums of a few random
    signs tell how far two tensors are apart. Not looked at are DTensors, and links on which each rank sends its own.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._seen: set[tuple[int, Direction, HopSpecs]] = set()
        self._looks: Counter[tuple[int, Direction]] = Counter()

    def check(
        self, hop: int, direction: Direction, specs: HopSpecs, tensors: Sequence[torch.Tensor], what: str
    ) -> None:
        """Raise LdtError on all ranks of the node if they are about to send different ``tensors`` over ``hop``.

        A collective call of these ranks if it is one for any; they send the same messages in one order.
        """
        key = (hop, direction, specs)
        if key in self._seen or self._looks[hop, direction] == _LOOKS or not self._is_shared(hop, direction):
            return
        self._seen.add(key)
        self._looks[hop, direction] += 1
        whole = [index for index, spec in enumerate(specs) if spec.shard is None and spec.nbytes]
        if not whole:
            return
        mine = torch.stack([_sketch(tensors[index]) for index in whole])
        found = torch.stack(self._mesh.control.all_gather_in_node(mine, f"the checksums of the {what}"))
        for index, of_ranks in zip(whole, found.unbind(1), strict=True):
            self._compare(of_ranks, specs[index], f"{what}, tensor {index}")

    def _is_shared(self, hop: int, direction: Direction) -> bool:
        """Whether one rank's tensors stand for those of all."""
        channel = self._mesh.topology.channel(hop, direction, 0)
        sources, targets = self._mesh.transfers.sizes(channel)
        return sources > 1 and not (self._mesh.transfers.mode(channel) == "direct" and sources == targets)

    def _compare(self, of_ranks: torch.Tensor, spec: TensorSpec, what: str) -> None:
        apart = [_distance(of_ranks[0], other) for other in of_ranks]
        allowed = math.sqrt(torch.finfo(spec.dtype).eps) if _is_continuous(spec.dtype) else 0.0
        ranks = self._mesh.rank_info.node_ranks
        others = [rank for rank, distance in zip(ranks, apart, strict=True) if not distance <= allowed]
        if others:
            raise LdtError(
                f"{what}, differs between rank {ranks[0]} and ranks {others} of stage {self._mesh.stage}, by "
                f"{max(apart):.2g} times its norm, but the next stage would get that of one rank for all: return a "
                "DTensor that is Shard(d) over mesh.tp_mesh where each rank has a part, with connect(transfer="
                '"direct") or "auto"; between stages of one size "direct" also carries plain tensors that differ. '
                "Where all ranks should have the same, look for sums that are not made over the stage, and for dropout "
                "from other random states"
            )


def _is_continuous(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@torch.no_grad()
def _sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers on the CPU: the squared norm, and sums with random signs; of whole numbers and bits a digest."""
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
    signs = torch.randint(2, (size, _PROJECTIONS), generator=draw).mul_(2).sub_(1).to(flat.device, wide)
    sums = torch.zeros(1 + _PROJECTIONS, dtype=wide, device=flat.device)
    for number, piece in enumerate(torch.split(flat, size)):
        values = piece.to(wide)
        sums[0] += values.square().sum()
        sums[1:] += (values @ signs[: len(values)]) * (1 if number.bit_count() % 2 else -1)
    return sums.double().cpu()


def _distance(first: torch.Tensor, other: torch.Tensor) -> float:
    """How far apart two tensors are, over the larger norm of both: 0 for equal ones, infinite if only one is finite."""
    if torch.equal(first, other):
        return 0.0
    finite = [bool(numbers.isfinite().all()) for numbers in (first, other)]
    if not all(finite):
        return math.inf if any(finite) else 0.0
    apart = float((first[1:] - other[1:]).square().mean().sqrt())
    return apart / math.sqrt(max(float(first[0]), float(other[0]), torch.finfo(torch.float64).tiny))
