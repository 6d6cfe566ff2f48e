"""In which strands a channel's messages travel: one between leaders, or one for each pair of ranks.

A strand is a lane of its own, from rank i of the sending node to rank i of the receiving one, which broadcasts what it
got in its stage. With k of them each carries a k-th of a message, so that k network cards or links work at once.
Direct strands carry whole messages, each rank's to its peer alone, and are not broadcast.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from ldt.topology import Channel, Topology

__all__ = [
    "LEADERS",
    "AllOf",
    "Strand",
    "Transfer",
    "check_transfer",
    "parts_of",
    "scatter_from",
    "strands_of",
]

logger = logging.getLogger(__name__)

Transfer = Literal["leader", "scatter", "direct", "auto"]
_BLOCK_BYTES = 512
AUTO_BYTES = (
    16 << 20
)  # from here on "auto" uses all strands: where they broke even on gloo (docs/performance.md)


def check_transfer(topology: Topology, transfer: str) -> None:
    """Raise ValueError for anything but a Transfer. Warns where "direct" is not what it says."""
    if transfer == "direct" and len(set(topology.tp)) > 1:
        logger.warning(
            "transfer='direct' is 'leader' between stages of different sizes, here tp=%s: ranks of a stage must have "
            "equal tensors there",
            list(topology.tp),
        )
    if transfer not in get_args(Transfer):
        raise ValueError(f"transfer must be 'leader', 'scatter', 'direct' or 'auto', got {transfer!r}")


class Strand(NamedTuple):
    """``place`` is the place of its ranks in their nodes; ``direct`` ones are not broadcast."""

    place: int
    direct: bool = False


LEADERS = Strand(0)


def strands_of(topology: Topology, channel: Channel, transfer: Transfer) -> tuple[Strand, ...]:
    """The strands of ``channel``. Where "direct" cannot be, as the sizes of the stages differ, it is "leader"."""
    sizes = topology.tp[channel.source.stage], topology.tp[channel.target.stage]
    direct = transfer == "direct" and sizes[0] == sizes[1] > 1
    if transfer == "leader" or (transfer == "direct" and not direct):
        return (LEADERS,)
    return tuple(Strand(place, direct) for place in range(min(sizes)))


def scatter_from(transfer: Transfer) -> int:
    """The bytes of a message from which on all strands carry it; the first alone carries a shorter one."""
    return AUTO_BYTES if transfer == "auto" else 0


def parts_of(tensors: Sequence[torch.Tensor], number: int) -> list[list[torch.Tensor]]:
    """What each of ``number`` strands carries: of every tensor a share of its elements. Views where that can be."""
    return [list(part) for part in zip(*(_cut(tensor, number) for tensor in tensors), strict=True)]


def _cut(tensor: torch.Tensor, number: int) -> Sequence[torch.Tensor]:
    """At whole blocks, as backends copy aligned memory faster."""
    block = max(1, _BLOCK_BYTES // tensor.element_size())
    share = math.ceil(tensor.numel() / number / block) * block
    return tensor.reshape(-1).tensor_split([share * place for place in range(1, number)])


class AllOf:
    """The works of all strands of a message as one, as far as the runtime uses a ``dist.Work``."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
