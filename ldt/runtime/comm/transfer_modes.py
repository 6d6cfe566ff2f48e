"""Transfer modes: the stripes that carry a channel's messages, from one between leaders to one per pair of ranks.

A stripe is a lane from one rank of the sending node to one rank of the receiving node, which broadcasts its data within
its stage. With k stripes each carries 1/k of a message, so that k network cards or links work at once. A direct stripe
is not broadcast: it carries what only its receiving rank needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, Union, get_args

import torch
import torch.distributed as dist

from ldt.runtime.comm.shards import overlapping
from ldt.topology import Channel, Topology

__all__ = [
    "LEADERS",
    "CompositeWork",
    "Stripe",
    "Transfer",
    "TransferChoice",
    "Transfers",
    "link_of",
    "links_by_stages",
    "parts_of",
]

Transfer = Literal["leader", "scatter", "direct", "auto"]
TransferChoice = Union[Transfer, Mapping[tuple[int, int], Transfer]]  # noqa: UP007 (evaluated)
_BLOCK_BYTES = 512
Value = TypeVar("Value")


class Stripe(NamedTuple):
    """``source`` and ``target`` are the tp ranks of its two ends. A ``direct`` stripe is not broadcast."""

    source: int
    target: int
    direct: bool = False


LEADERS = Stripe(0, 0)


@dataclass(frozen=True)
class Transfers:
    """The transfer mode of each link. ``by_link`` overrides ``default``; its keys are (lower, upper) stages."""

    topology: Topology
    default: Transfer
    by_link: Mapping[tuple[int, int], Transfer]

    @classmethod
    def of(cls, topology: Topology, choice: TransferChoice) -> Transfers:
        """``choice`` is one mode for all links, or a dict of modes by link, where other links use "leader".

        Raises ValueError for an unknown mode, or a link that the topology does not have.
        """
        if not isinstance(choice, Mapping):
            return cls(topology, _checked(choice), {})
        links = sorted({link_of(channel) for channel in topology.channels})
        by_link = links_by_stages("transfer", choice, links, topology)
        for mode in by_link.values():
            _checked(mode)
        return cls(topology, "leader", by_link)

    def mode(self, channel: Channel) -> Transfer:
        """The transfer mode of ``channel``."""
        return self.by_link.get(link_of(channel), self.default)

    def sizes(self, channel: Channel) -> tuple[int, int]:
        """The number of ranks of the sending and of the receiving node."""
        return self.topology.tp[channel.source.stage], self.topology.tp[channel.target.stage]

    def stripes(self, channel: Channel) -> tuple[Stripe, ...]:
        """The leaders' stripe, then other broadcast stripes, then direct ones."""
        sources, targets = self.sizes(channel)
        mode = self.mode(channel)
        if sources == targets == 1:
            return (LEADERS,)
        shared = [Stripe(rank, rank) for rank in range(min(sources, targets))]
        if mode in ("leader", "scatter"):
            return tuple(shared if mode == "scatter" else shared[:1])
        if sources == targets:
            peers = [Stripe(rank, rank, direct=True) for rank in range(sources)]
            return tuple(peers if mode == "direct" else shared + peers)
        pairs = [Stripe(source, target, direct=True) for source, target in overlapping(sources, targets)]
        return tuple(shared + pairs if mode == "auto" else shared[:1] + pairs)

    def scatter_from(self, channel: Channel) -> float:
        """The message size in bytes from which messages are cut, until "auto" has measured the link."""
        return 0.0 if self.mode(channel) == "scatter" else math.inf

    def can_split(self, channel: Channel) -> bool:
        """Whether sharded tensors can cross this channel."""
        stripes = self.stripes(channel)
        return stripes[-1].direct or self.sizes(channel) == (1, 1)

    def to_text(self) -> str:
        """A text that is equal on ranks with equal settings."""
        named = [f"{lower}-{upper}:{mode}" for (lower, upper), mode in sorted(self.by_link.items())]
        return ", ".join([self.default, *named])


def link_of(channel: Channel) -> tuple[int, int]:
    """The stages of a channel's two ends, (lower, upper)."""
    lower, upper = sorted((channel.source.stage, channel.target.stage))
    return lower, upper


def links_by_stages(
    setting: str,
    choice: Mapping[tuple[int, int], Value],
    links: Sequence[tuple[int, int]],
    topology: Topology,
    kind: str = "links",
) -> dict[tuple[int, int], Value]:
    """A dict by link with its keys as (lower, upper). Raises ValueError for a key that is none of ``links``.

    ``setting`` and ``kind`` name the argument and its links in that error.
    """
    by_link: dict[tuple[int, int], Value] = {}
    for stages, value in choice.items():
        link = next((link for link in links if stages in (link, link[::-1])), None)
        if link is None:
            raise ValueError(
                f"{setting} names a link {stages!r}, but the {kind} of {topology.to_text()} are between stages "
                f"{', '.join(map(str, links)) or '(none)'}"
            )
        if link in by_link:
            raise ValueError(
                f"{setting} names the link {link} twice: give only one of {stages} and {stages[::-1]}"
            )
        by_link[link] = value
    return by_link


def _checked(mode: Transfer) -> Transfer:
    if mode not in get_args(Transfer):
        raise ValueError(
            f"transfer must be 'leader', 'scatter', 'direct' or 'auto', or a dict of these by link such as "
            f"{{(0, 1): 'direct'}}, got {mode!r}"
        )
    return mode


def parts_of(tensors: Sequence[torch.Tensor], number: int) -> list[list[torch.Tensor]]:
    """The parts for ``number`` stripes: a share of every tensor's elements each, as views where possible."""
    cut = [_cut(tensor, number) for tensor in tensors]
    return [[parts[index] for parts in cut] for index in range(number)]


def _cut(tensor: torch.Tensor, number: int) -> Sequence[torch.Tensor]:
    """Cut at whole blocks: backends copy aligned memory faster."""
    block = max(1, _BLOCK_BYTES // tensor.element_size())
    share = math.ceil(tensor.numel() / number / block) * block
    return tensor.reshape(-1).tensor_split([share * index for index in range(1, number)])


class CompositeWork:
    """The works of a message's stripes as one: the part of ``dist.Work`` that the runtime uses."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
