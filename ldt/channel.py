"""Nodes, the channels between them, and the keys of the lanes that carry channels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ldt.errors import TopologyError

__all__ = ["Channel", "Direction", "LaneKey", "LanePolicy", "Node", "dedicated_lane", "listed", "paired_lane"]

Direction = Literal["F", "B"]
LanePolicy = Literal["dedicated", "paired"]
_NODE = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")


class Node(NamedTuple):
    """One stage of one replica: the unit that owns a row of a plan. Prints as ``stage.replica``."""

    stage: int
    replica: int

    def __str__(self) -> str:
        return f"{self.stage}.{self.replica}"

    @classmethod
    def parse(cls, text: str) -> Node:
        """Parse the text that ``str`` returns. Raises TopologyError for anything else."""
        match = _NODE.fullmatch(text.strip())
        if match is None:
            raise TopologyError(
                f"expected a node as 'stage.replica', for example '1.0', got {text.strip()[:80]!r}"
            )
        return cls(int(match[1]), int(match[2]))


def listed(nodes: Sequence[Node], limit: int = 16) -> str:
    """The first ``limit`` nodes as text, for an error."""
    more = f" and {len(nodes) - limit} more" if len(nodes) > limit else ""
    return ", ".join(map(str, nodes[:limit])) + more


@dataclass(frozen=True, order=True)
class Channel:
    """One directed logical flow between two nodes, first in first out.

    ``hop`` is the chunk c of the hop c -> c+1. Direction "F" carries c's output to c+1, direction "B" carries
    the gradient of c+1's input back to c. A message is identified by (channel, microbatch).
    """

    source: Node
    target: Node
    hop: int
    direction: Direction

    @property
    def replica(self) -> int:
        """The cloud replica this channel belongs to: one end of every channel is a cloud node."""
        return self.target.replica if self.source.stage == 0 else self.source.replica

    @property
    def name(self) -> str:
        """For example ``F0:0.0->1.0``."""
        return f"{self.direction}{self.hop}:{self.source}->{self.target}"

    def __str__(self) -> str:
        return self.name


class LaneKey(NamedTuple):
    """The name of a lane. ``colour`` is "pang", "ping", ... for paired lanes, direction and hop ("F0") otherwise."""

    colour: str
    replica: int

    def __str__(self) -> str:
        return f"{self.colour}.{self.replica}"


def dedicated_lane(channel: Channel) -> LaneKey:
    """Give each channel its own lane."""
    return LaneKey(f"{channel.direction}{channel.hop}", channel.replica)


def paired_lane(channel: Channel) -> LaneKey:
    """Give a channel one of the replica's two lanes, by the stage of its sender. See ``ldt.topology.lanes``."""
    if channel.source.stage % 2 == channel.target.stage % 2:  # only the wraparound of an odd number of stages
        colour = "first_to_last" if channel.source.stage == 0 else "last_to_first"
    else:
        colour = "ping" if channel.source.stage % 2 else "pang"
    return LaneKey(colour, channel.replica)
