"""The names of things between nodes: a node, a channel from one to another, the lane that a channel rides on."""

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
        """Read what ``str`` writes. Raises TopologyError for anything else."""
        match = _NODE.fullmatch(text.strip())
        if match is None:
            raise TopologyError(
                f"expected a node as 'stage.replica', for example '1.0', got {text.strip()[:80]!r}"
            )
        return cls(int(match[1]), int(match[2]))


def listed(nodes: Sequence[Node], most: int = 16) -> str:
    """Nodes for the text of an error, of many the first."""
    more = f" and {len(nodes) - most} more" if len(nodes) > most else ""
    return ", ".join(map(str, nodes[:most])) + more


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
    """Names one lane. ``colour`` is "pang", "ping", ... when paired; hop and direction ("F0") if not."""

    colour: str
    replica: int

    def __str__(self) -> str:
        return f"{self.colour}.{self.replica}"


def dedicated_lane(channel: Channel) -> LaneKey:
    """A lane of its own for each channel."""
    return LaneKey(f"{channel.direction}{channel.hop}", channel.replica)


def paired_lane(channel: Channel) -> LaneKey:
    """One of two lanes of the replica, by the stage of the sender; see ``ldt.topology.lanes``."""
    if channel.source.stage % 2 == channel.target.stage % 2:  # only the wraparound of an odd number of stages
        colour = "first_to_last" if channel.source.stage == 0 else "last_to_first"
    else:
        colour = "ping" if channel.source.stage % 2 else "pang"
    return LaneKey(colour, channel.replica)
