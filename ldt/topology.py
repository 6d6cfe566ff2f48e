"""Who runs what: ranks, stages, replicas, chunks, channels between nodes and the lanes that carry them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from ldt.channel import Channel, Direction, LaneKey, LanePolicy, Node, dedicated_lane, listed, paired_lane
from ldt.errors import TopologyError

__all__ = ["Channel", "Direction", "LaneKey", "LanePolicy", "Node", "Topology", "lanes", "listed"]

_NUMBER = "[0-9]{1,6}"
# Nobody has more, and a wrong file must not ask for it.
_MOST_RANKS = 1_000_000
_MOST_PLACES = 100_000  # chunks of all replicas
_TEXT = re.compile(f"tp=({_NUMBER}(?:,{_NUMBER})*) +dp=({_NUMBER}) +edge_dp=({_NUMBER}) +laps=({_NUMBER})")


@dataclass(frozen=True, init=False)
class Topology:
    """How many ranks hold which part of the model.

    ``tp[s]`` is the number of tensor-parallel ranks of stage s; stage 0 is the edge. ``dp`` replicas of the
    cloud stages are served by ``edge_dp`` replicas of the edge (default: as many): edge replica e deals its
    microbatches in turn to the cloud replicas e, e + edge_dp, e + 2 * edge_dp, ... ``laps`` is the number of
    walks through all P stages: chunk c < laps * P sits on stage c % P, and the last, the tail, on the edge.

    Raises TopologyError naming the number that is wrong, and for more than a million ranks or 100,000 chunks of all
    replicas.
    """

    tp: tuple[int, ...]
    dp: int
    edge_dp: int
    laps: int

    def __init__(self, tp: Sequence[int], dp: int = 1, edge_dp: int | None = None, laps: int = 1) -> None:
        object.__setattr__(self, "tp", tuple(tp))
        object.__setattr__(self, "dp", dp)
        object.__setattr__(self, "edge_dp", dp if edge_dp is None else edge_dp)
        object.__setattr__(self, "laps", laps)
        self._check()

    def _check(self) -> None:
        if not self.tp:
            raise TopologyError("tp is empty: give the ranks of each stage, for example tp=[1, 2, 2]")
        counts = [(f"tp[{stage}]", size) for stage, size in enumerate(self.tp)]
        counts += [("dp", self.dp), ("edge_dp", self.edge_dp), ("laps", self.laps)]
        for name, count in counts:
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise TopologyError(f"{name} must be a whole number of at least 1, got {count!r}")
            if count > _MOST_RANKS:
                raise TopologyError(f"{name} must be at most {_MOST_RANKS}")
        if self.dp % self.edge_dp:
            raise TopologyError(
                f"edge_dp={self.edge_dp} does not divide dp={self.dp}: "
                "each edge replica must serve equally many cloud replicas"
            )
        if self.num_stages == 1 and self.edge_dp != self.dp:
            raise TopologyError(
                f"one stage has no cloud, so edge_dp must equal dp: got edge_dp={self.edge_dp}, dp={self.dp}"
            )
        self._check_size()

    def _check_size(self) -> None:
        """Of what is made of the numbers later, before anything is."""
        ranks = self.edge_dp * self.tp[0] + self.dp * sum(self.tp[1:])
        places = self.dp * self.num_chunks
        if ranks > _MOST_RANKS or places > _MOST_PLACES:
            raise TopologyError(
                f"expected at most {_MOST_RANKS} ranks and {_MOST_PLACES} chunks of all replicas, got {ranks} and "
                f"{places}: dp={self.dp} replicas of laps={self.laps} over {self.num_stages} stages"
            )

    # -- stages and chunks -----------------------------------------------------------------------------------

    @cached_property
    def num_stages(self) -> int:
        return len(self.tp)

    @cached_property
    def num_chunks(self) -> int:
        return self.laps * self.num_stages + 1

    @cached_property
    def tail(self) -> int:
        """The last chunk, which ends on the edge and owns the loss."""
        return self.num_chunks - 1

    def replicas(self, stage: int) -> int:
        """Number of replicas of ``stage``."""
        return self.edge_dp if stage == 0 else self.dp

    def stage_of(self, chunk: int) -> int:
        """The stage that holds ``chunk``."""
        if not 0 <= chunk < self.num_chunks:
            raise TopologyError(f"chunk {chunk} does not exist: this topology has chunks 0 to {self.tail}")
        return chunk % self.num_stages

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks of ``stage`` in model order."""
        return tuple(range(stage, self.num_chunks, self.num_stages))

    # -- microbatches ----------------------------------------------------------------------------------------

    @property
    def served(self) -> int:
        """How many cloud replicas each replica of the edge serves in turn."""
        return self.dp // self.edge_dp

    @cached_property
    def _cloud_replicas(self) -> dict[Node, range]:
        return {
            node: range(node.replica, self.dp if node.stage == 0 else node.replica + 1, self.edge_dp)
            for node in self.nodes
        }

    def cloud_replicas(self, node: Node) -> range:
        """The cloud replicas that ``node`` works for: of the edge all that it serves, of the cloud its own."""
        return self._cloud_replicas[node]

    def turn_of(self, node: Node) -> int:
        """The place of a cloud node among those that its edge replica serves in turn; 0 for the edge itself."""
        return node.replica // self.edge_dp

    def cloud_replica(self, node: Node, microbatch: int) -> int:
        """The cloud replica that ``node`` does ``microbatch`` for: of edge replica e, e + edge_dp * (j % served).

        Microbatches j are numbered by the edge replica that has them and dealt round robin to those it serves.
        """
        replicas = self._cloud_replicas[node]
        return replicas[microbatch % len(replicas)]

    def microbatches_of(self, node: Node, num_microbatches: int) -> range:
        """Those of its edge replica's ``num_microbatches`` that ``node`` works on: on the edge all of them."""
        step = self.served // len(self._cloud_replicas[node])
        return range(self.turn_of(node), num_microbatches, step)

    # -- ranks -----------------------------------------------------------------------------------------------

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes in rank order: the edge's replicas first, then stage by stage."""
        return tuple(
            Node(stage, replica)
            for stage in range(self.num_stages)
            for replica in range(self.replicas(stage))
        )

    @cached_property
    def _ranks(self) -> dict[Node, tuple[int, ...]]:
        ranks, first = {}, 0
        for node in self.nodes:
            ranks[node] = tuple(range(first, first + self.tp[node.stage]))
            first += self.tp[node.stage]
        return ranks

    @cached_property
    def _node_of_rank(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes for _ in self._ranks[node])

    @property
    def world_size(self) -> int:
        return len(self._node_of_rank)

    def ranks_of(self, node: Node) -> tuple[int, ...]:
        """The ranks of ``node``, which are consecutive."""
        if node not in self._ranks:
            raise TopologyError(f"node {node} does not exist: nodes are {listed(self.nodes)}")
        return self._ranks[node]

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """The ranks of all replicas of ``stage``, which are consecutive."""
        return tuple(
            rank for replica in range(self.replicas(stage)) for rank in self.ranks_of(Node(stage, replica))
        )

    def leader_of(self, node: Node) -> int:
        """The first rank of ``node``; unless messages are cut in shares, it alone talks to other nodes."""
        return self.ranks_of(node)[0]

    def node_of(self, rank: int) -> Node:
        if not 0 <= rank < self.world_size:
            raise TopologyError(
                f"rank {rank} does not exist: this topology has ranks 0 to {self.world_size - 1}"
            )
        return self._node_of_rank[rank]

    def tp_rank_of(self, rank: int) -> int:
        """Position of ``rank`` within its node; 0 is the leader."""
        return rank - self.leader_of(self.node_of(rank))

    # -- hops and channels -----------------------------------------------------------------------------------

    def crosses(self, hop: int) -> bool:
        """True if the hop from chunk ``hop`` to the next exists and goes to another node, so that it has channels."""
        return 0 <= hop < self.tail and self.num_stages > 1  # consecutive chunks are on consecutive stages

    def node_at(self, chunk: int, replica: int) -> Node:
        """The node that runs ``chunk`` for cloud replica ``replica``; an edge one serves every edge_dp-th."""
        stage = self.stage_of(chunk)
        return Node(stage, replica % self.edge_dp if stage == 0 else replica)

    @cached_property
    def _channels(self) -> dict[tuple[int, Direction, int], Channel]:
        channels: dict[tuple[int, Direction, int], Channel] = {}
        for replica in range(self.dp):
            for hop in filter(self.crosses, range(self.tail)):
                below, above = self.node_at(hop, replica), self.node_at(hop + 1, replica)
                channels[hop, "F", replica] = Channel(below, above, hop, "F")
                channels[hop, "B", replica] = Channel(above, below, hop, "B")
        return channels

    def channel(self, hop: int, direction: Direction, replica: int) -> Channel:
        """The channel of ``hop`` for cloud replica ``replica``. Raises TopologyError if the hop is local."""
        channel = self._channels.get((hop, direction, replica))
        if channel is None:
            raise TopologyError(
                f"hop {hop}->{hop + 1} of replica {replica} has no channel: it is local or does not exist"
            )
        return channel

    @cached_property
    def channels(self) -> tuple[Channel, ...]:
        """Every channel, by replica, then hop, forward before backward: the one global order."""
        return tuple(self._channels.values())

    # -- text ------------------------------------------------------------------------------------------------

    def to_text(self) -> str:
        """One line, for example ``tp=1,2,2 dp=1 edge_dp=1 laps=1``."""
        return f"tp={','.join(map(str, self.tp))} dp={self.dp} edge_dp={self.edge_dp} laps={self.laps}"

    @classmethod
    def from_text(cls, text: str) -> Topology:
        """Read what ``to_text`` writes. Raises TopologyError for anything else."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise TopologyError(
                f"expected a topology as 'tp=1,2,2 dp=1 edge_dp=1 laps=1', got {text.strip()[:80]!r}"
            )
        dp, edge_dp, laps = map(int, match.groups()[1:])
        return cls([int(size) for size in match[1].split(",")], dp=dp, edge_dp=edge_dp, laps=laps)

    def describe(self) -> str:
        """For people: a line for each node with its ranks and chunks, then the way through them for each replica."""
        lines = [self.to_text(), f"{'node':<8}{'ranks':<16}chunks"]
        for node in self.nodes:
            lines.append(
                f"{node!s:<8}{self._span(node):<16}{', '.join(map(str, self.chunks_of(node.stage)))}"
            )
        for replica in range(self.dp):
            way = (self.node_at(chunk, replica) for chunk in range(self.num_chunks))
            lines.append(f"replica {replica}: " + " -> ".join(f"{node} [{self._span(node)}]" for node in way))
        return "\n".join(lines)

    def _span(self, node: Node) -> str:
        ranks = self.ranks_of(node)
        return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def lanes(topology: Topology, policy: LanePolicy) -> dict[Channel, LaneKey]:
    """The lane every channel rides on.

    "dedicated" gives each channel a lane. "paired" has two lanes per replica, told apart by the sender: an
    even stage sends on pang and receives on ping, an odd stage the other way round. With an odd number of
    stages both ends of the wraparound link are even, so its activations ride on last_to_first and its
    gradients on first_to_last. A node is on a lane either only as sender or only as receiver.
    """
    if policy not in get_args(LanePolicy):
        raise TopologyError(f"lane policy must be 'dedicated' or 'paired', got {policy!r}")
    lane_of = dedicated_lane if policy == "dedicated" else paired_lane
    return {channel: lane_of(channel) for channel in topology.channels}
