"""In which strands a channel's messages travel: one between leaders, one for each pair of ranks, or from all to all.

A strand is a lane of its own, from one rank of the sending node to one of the receiving node, which broadcasts what it
got in its stage. With k of them each carries a k-th of a message, so that k network cards or links work at once.
Direct strands are not broadcast: they bring each rank what it alone needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Union, get_args

import torch
import torch.distributed as dist

from ldt.runtime.comm.shards import overlapping
from ldt.topology import Channel, Topology

__all__ = ["LEADERS", "CompositeWork", "Stripe", "Transfer", "TransferChoice", "Transfers", "parts_of"]

Transfer = Literal["leader", "scatter", "direct", "auto"]
TransferChoice = Union[Transfer, Mapping[tuple[int, int], Transfer]]  # noqa: UP007 (evaluated)
_BLOCK_BYTES = 512


class Stripe(NamedTuple):
    """``source`` and ``target`` are the places of its ranks in their nodes; ``direct`` ones are not broadcast."""

    source: int
    target: int
    direct: bool = False


LEADERS = Stripe(0, 0)


@dataclass(frozen=True)
class Transfers:
    """The way of each link: ``by_link`` has those of links that were named, by their stages, lower one first."""

    topology: Topology
    default: Transfer
    by_link: Mapping[tuple[int, int], Transfer]

    @classmethod
    def of(cls, topology: Topology, choice: TransferChoice) -> Transfers:
        """``choice`` is one way for all links, or ways by link; links that are not named have "leader".

        Raises ValueError for anything else, and for links that the topology has not.
        """
        if not isinstance(choice, Mapping):
            return cls(topology, _checked(choice), {})
        links = {_link(channel) for channel in topology.channels}
        by_link: dict[tuple[int, int], Transfer] = {}
        for stages, way in choice.items():
            link = next((link for link in links if stages in (link, link[::-1])), None)
            if link is None:
                raise ValueError(
                    f"transfer names a link {stages!r}: those of {topology.to_text()} are between stages "
                    f"{', '.join(map(str, sorted(links))) or '(none)'}"
                )
            if link in by_link:
                raise ValueError(
                    f"transfer names the link {link} twice: give one of {stages} and {stages[::-1]}"
                )
            by_link[link] = _checked(way)
        return cls(topology, "leader", by_link)

    def mode(self, channel: Channel) -> Transfer:
        """How messages of ``channel`` go."""
        return self.by_link.get(_link(channel), self.default)

    def sizes(self, channel: Channel) -> tuple[int, int]:
        """Ranks of the sending and of the receiving node."""
        return self.topology.tp[channel.source.stage], self.topology.tp[channel.target.stage]

    def stripes(self, channel: Channel) -> tuple[Stripe, ...]:
        """The leaders' first, then others that are broadcast, then direct ones."""
        sources, targets = self.sizes(channel)
        way = self.mode(channel)
        if sources == targets == 1:
            return (LEADERS,)
        shared = [Stripe(place, place) for place in range(min(sources, targets))]
        if way in ("leader", "scatter"):
            return tuple(shared if way == "scatter" else shared[:1])
        if sources == targets:
            peers = [Stripe(place, place, direct=True) for place in range(sources)]
            return tuple(peers if way == "direct" else shared + peers)
        pairs = [Stripe(source, target, direct=True) for source, target in overlapping(sources, targets)]
        return tuple(shared + pairs if way == "auto" else shared[:1] + pairs)

    def scatter_from(self, channel: Channel) -> float:
        """The bytes of a message from which on it is cut, until "auto" has measured the link."""
        return 0.0 if self.mode(channel) == "scatter" else math.inf

    def can_split(self, channel: Channel) -> bool:
        """Whether tensors can cross of which each rank has a part."""
        stripes = self.stripes(channel)
        return stripes[-1].direct or self.sizes(channel) == (1, 1)

    def to_text(self) -> str:
        """Equal on ranks that were given the same."""
        named = [f"{lower}-{upper}:{way}" for (lower, upper), way in sorted(self.by_link.items())]
        return ", ".join([self.default, *named])


def _link(channel: Channel) -> tuple[int, int]:
    lower, upper = sorted((channel.source.stage, channel.target.stage))
    return lower, upper


def _checked(way: Transfer) -> Transfer:
    if way not in get_args(Transfer):
        raise ValueError(
            f"transfer must be 'leader', 'scatter', 'direct' or 'auto', or a dict of these by link such as "
            f"{{(0, 1): 'direct'}}, got {way!r}"
        )
    return way


def parts_of(tensors: Sequence[torch.Tensor], number: int) -> list[list[torch.Tensor]]:
    """What each of ``number`` strands carries: of every tensor a share of its elements. Views where that can be."""
    cut = [_cut(tensor, number) for tensor in tensors]
    return [[parts[place] for parts in cut] for place in range(number)]


def _cut(tensor: torch.Tensor, number: int) -> Sequence[torch.Tensor]:
    """At whole blocks, as backends copy aligned memory faster."""
    block = max(1, _BLOCK_BYTES // tensor.element_size())
    share = math.ceil(tensor.numel() / number / block) * block
    return tensor.reshape(-1).tensor_split([share * place for place in range(1, number)])


class CompositeWork:
    """The works of all strands of a message as one, as far as the runtime uses a ``dist.Work``."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
