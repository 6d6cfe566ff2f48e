"""Maps ranks to stages, replicas and chunks, and channels between nodes to the lanes that carry them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from ldt.channel import Channel, Direction, LaneKey, LanePolicy, Node, dedicated_lane, listed, paired_lane
from ldt.errors import TopologyError
from ldt.placement import check_parity, check_placement, looped
from ldt.site import SITES, Site, check_sites, parse_sites, sites_text

__all__ = ["Channel", "Direction", "LaneKey", "LanePolicy", "Node", "Site", "Topology", "lanes", "listed"]

_NUMBER = "[0-9]{1,6}"
# Far more than any job has: a corrupt file must not allocate more.
_MAX_RANKS = 1_000_000
_MAX_CHUNKS = 100_000  # of all replicas
_NUMBERS = f"{_NUMBER}(?:,{_NUMBER})*"
_TEXT = re.compile(
    f"tp=({_NUMBERS}) +dp=({_NUMBER}) +edge_dp=({_NUMBER}) +laps=({_NUMBER})"
    f"(?: +placement=({_NUMBERS}))?(?: +sites=({SITES}))?"
)


@dataclass(frozen=True, init=False)
class Topology:
    """The ranks of each stage, the replicas, and the laps of the model over the stages. Immutable and hashable.

    The model is cut into ``laps * P + 1`` chunks for P stages. Chunk c < laps * P is on stage c % P; the last chunk,
    the tail, is on the edge. ``placement`` gives chunks other stages. Ranks are numbered by stage, then replica, then
    TP rank.

    Args:
        tp: ``tp[s]`` is the number of tensor-parallel ranks of each replica of stage s. Stage 0 is the edge.
        dp: Number of replicas of the cloud stages.
        edge_dp: Number of replicas of the edge; must divide ``dp``. Edge replica e deals its microbatches round robin
            to the cloud replicas e, e + edge_dp, e + 2 * edge_dp, ... Default: ``dp``.
        laps: Number of walks through all stages: 1 for a language model, 2 for a vision-language model.
        placement: The stage of each chunk in model order, in place of ``laps``: ``[0, 1, 2, 2, 1, 0]`` is the V of
            zero-bubble schedules. The first and the last chunk are on the edge, and every stage has one. ``laps`` is
            then the number of the edge's chunks behind the first.
        sites: The site of each stage, a number or a name: ``[0, 1, 1]`` or ``["office", "cloud", "cloud"]``. All that
            crosses from one site to another shares one pipe; nodes of one site have links of their own. Only plans
            and their times depend on it. The edge has a site of its own. Default: all cloud stages are on another.

    Raises:
        TopologyError: A number is wrong; names it. Also for more than a million ranks, or 100,000 chunks of all
            replicas.
    """

    tp: tuple[int, ...]
    dp: int
    edge_dp: int
    laps: int
    sites: tuple[Site, ...]
    placement: tuple[int, ...]

    def __init__(
        self,
        tp: Sequence[int],
        dp: int = 1,
        edge_dp: int | None = None,
        laps: int | None = None,
        sites: Sequence[Site] | None = None,
        placement: Sequence[int] | None = None,
    ) -> None:
        object.__setattr__(self, "tp", tuple(tp))
        object.__setattr__(self, "dp", dp)
        object.__setattr__(self, "edge_dp", dp if edge_dp is None else edge_dp)
        object.__setattr__(self, "laps", 1 if laps is None else laps)
        self._check()
        self._place(laps, placement)
        object.__setattr__(self, "sites", check_sites(sites, self.num_stages))

    def _check(self) -> None:
        if not self.tp:
            raise TopologyError("tp is empty: give the ranks of each stage, for example tp=[1, 2, 2]")
        counts = [(f"tp[{stage}]", size) for stage, size in enumerate(self.tp)]
        counts += [("dp", self.dp), ("edge_dp", self.edge_dp), ("laps", self.laps)]
        for name, count in counts:
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise TopologyError(f"{name} must be a whole number of at least 1, got {count!r}")
            if count > _MAX_RANKS:
                raise TopologyError(f"{name} must be at most {_MAX_RANKS}")
        if self.dp % self.edge_dp:
            raise TopologyError(
                f"edge_dp={self.edge_dp} does not divide dp={self.dp}: "
                "each edge replica must serve equally many cloud replicas"
            )
        if self.num_stages == 1 and self.edge_dp != self.dp:
            raise TopologyError(
                f"one stage has no cloud, so edge_dp must equal dp: got edge_dp={self.edge_dp}, dp={self.dp}"
            )
        self._check_size(self.laps * self.num_stages + 1)

    def _place(self, laps: int | None, placement: Sequence[int] | None) -> None:
        """Set ``placement``, and ``laps`` by it."""
        if placement is None:
            object.__setattr__(self, "placement", looped(self.num_stages, self.laps))
            return
        object.__setattr__(self, "placement", check_placement(placement, self.num_stages))
        object.__setattr__(self, "laps", self.placement.count(0) - 1)
        if laps not in (None, self.laps):
            raise TopologyError(
                f"laps={laps} does not fit placement={list(self.placement)}, which has {self.laps + 1} chunks on the "
                "edge: give placement alone"
            )
        self._check_size(self.num_chunks)

    def _check_size(self, chunks_of_replica: int) -> None:
        """Check the number of ranks and chunks before anything is built from them."""
        ranks = self.edge_dp * self.tp[0] + self.dp * sum(self.tp[1:])
        chunks = self.dp * chunks_of_replica
        if ranks > _MAX_RANKS or chunks > _MAX_CHUNKS:
            raise TopologyError(
                f"expected at most {_MAX_RANKS} ranks and {_MAX_CHUNKS} chunks of all replicas, got {ranks} and "
                f"{chunks}: dp={self.dp} replicas of {chunks_of_replica} chunks on {self.num_stages} stages"
            )

    # -- stages and chunks -----------------------------------------------------------------------------------

    @cached_property
    def num_stages(self) -> int:
        """Number of stages, P."""
        return len(self.tp)

    @cached_property
    def num_chunks(self) -> int:
        """Number of chunks: ``laps * P + 1``, or as many as ``placement`` says."""
        return len(self.placement)

    @cached_property
    def tail(self) -> int:
        """The last chunk, on the edge, which owns the loss."""
        return self.num_chunks - 1

    @cached_property
    def is_looped(self) -> bool:
        """Whether chunk c is on stage c % P, as without ``placement``. torch calls this the style "loop"."""
        return self.placement == looped(self.num_stages, self.laps)

    def replicas(self, stage: int) -> int:
        """The number of replicas of ``stage``."""
        return self.edge_dp if stage == 0 else self.dp

    def stage_of(self, chunk: int) -> int:
        """The stage that holds ``chunk``."""
        if not 0 <= chunk < self.num_chunks:
            raise TopologyError(f"chunk {chunk} does not exist: this topology has chunks 0 to {self.tail}")
        return self.placement[chunk]

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks of ``stage`` in model order."""
        return tuple(chunk for chunk, its_stage in enumerate(self.placement) if its_stage == stage)

    # -- microbatches ----------------------------------------------------------------------------------------

    @property
    def served(self) -> int:
        """Number of cloud replicas that each edge replica serves, ``dp / edge_dp``."""
        return self.dp // self.edge_dp

    @cached_property
    def _cloud_replicas(self) -> dict[Node, range]:
        return {
            node: range(node.replica, self.dp if node.stage == 0 else node.replica + 1, self.edge_dp)
            for node in self.nodes
        }

    def cloud_replicas(self, node: Node) -> range:
        """The cloud replicas that ``node`` works for: all that an edge node serves, a cloud node's own."""
        return self._cloud_replicas[node]

    def turn_of(self, node: Node) -> int:
        """The index of a cloud node among those that its edge replica serves in turn; 0 for the edge itself."""
        return node.replica // self.edge_dp

    def cloud_replica(self, node: Node, microbatch: int) -> int:
        """The cloud replica that ``node`` runs ``microbatch`` for: e + edge_dp * (j % served) on edge replica e.

        Each edge replica numbers its own microbatches j and deals them round-robin to the cloud replicas it serves.
        """
        replicas = self._cloud_replicas[node]
        return replicas[microbatch % len(replicas)]

    def microbatches_of(self, node: Node, num_microbatches: int) -> range:
        """Those of its edge replica's ``num_microbatches`` that ``node`` runs; an edge node runs all."""
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
        """Number of ranks."""
        return len(self._node_of_rank)

    def ranks_of(self, node: Node) -> tuple[int, ...]:
        """The ranks of ``node``. They are consecutive."""
        if node not in self._ranks:
            raise TopologyError(f"node {node} does not exist: nodes are {listed(self.nodes)}")
        return self._ranks[node]

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """The ranks of all replicas of ``stage``. They are consecutive."""
        return tuple(
            rank for replica in range(self.replicas(stage)) for rank in self.ranks_of(Node(stage, replica))
        )

    def leader_of(self, node: Node) -> int:
        """The first rank of ``node``. With transfer "leader" it alone sends to and receives from other nodes."""
        return self.ranks_of(node)[0]

    def node_of(self, rank: int) -> Node:
        """The node of ``rank``. Raises TopologyError if there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(
                f"rank {rank} does not exist: this topology has ranks 0 to {self.world_size - 1}"
            )
        return self._node_of_rank[rank]

    def tp_rank_of(self, rank: int) -> int:
        """The index of ``rank`` within its node; 0 is the leader."""
        return rank - self.leader_of(self.node_of(rank))

    # -- hops and channels -----------------------------------------------------------------------------------

    def crosses(self, hop: int) -> bool:
        """True if the hop from chunk ``hop`` to the next exists and goes to another node. It then has channels."""
        return 0 <= hop < self.tail and self.placement[hop] != self.placement[hop + 1]

    def node_at(self, chunk: int, replica: int) -> Node:
        """The node that runs ``chunk`` for cloud replica ``replica``. An edge replica serves every edge_dp-th."""
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
        """All channels, in the order in which ranks connect them: by replica, then hop, forward before backward."""
        return tuple(self._channels.values())

    def pipe_of(self, channel: Channel) -> str:
        """The name of what the messages of ``channel`` take turns on, with those of all channels of the same pipe.

        From one site to another ``site->site``, whatever the replicas; within a site ``node->node``.
        """
        source, target = channel.source, channel.target
        if self.is_local(channel):
            return f"{source}->{target}"
        return f"{self.sites[source.stage]}->{self.sites[target.stage]}"

    def is_local(self, channel: Channel) -> bool:
        """Whether ``channel`` stays within a site, where its two nodes have links of their own."""
        return self.sites[channel.source.stage] == self.sites[channel.target.stage]

    # -- text ------------------------------------------------------------------------------------------------

    def to_text(self) -> str:
        """One line, for example ``tp=1,2,2 dp=1 edge_dp=1 laps=1``, with placement and sites where not the default."""
        text = f"tp={','.join(map(str, self.tp))} dp={self.dp} edge_dp={self.edge_dp} laps={self.laps}"
        if not self.is_looped:
            text += f" placement={','.join(map(str, self.placement))}"
        default = self.sites == check_sites(None, self.num_stages)
        return text if default else f"{text} sites={sites_text(self.sites)}"

    @classmethod
    def from_text(cls, text: str) -> Topology:
        """Parse the text of ``to_text``. Raises TopologyError for anything else."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise TopologyError(
                f"expected a topology as 'tp=1,2,2 dp=1 edge_dp=1 laps=1', got {text.strip()[:80]!r}"
            )
        dp, edge_dp, laps = map(int, match.groups()[1:4])
        placement = None if match[5] is None else list(map(int, match[5].split(",")))
        sites = None if match[6] is None else parse_sites(match[6])
        return cls(list(map(int, match[1].split(","))), dp, edge_dp, laps, sites, placement)

    def describe(self) -> str:
        """Return a description to print: each node's ranks and chunks, then each replica's path through the nodes."""
        lines = [self.to_text(), f"{'node':<8}{'ranks':<16}chunks"]
        for node in self.nodes:
            lines.append(
                f"{node!s:<8}{self._span(node):<16}{', '.join(map(str, self.chunks_of(node.stage)))}"
            )
        for replica in range(self.dp):
            path = (self.node_at(chunk, replica) for chunk in range(self.num_chunks))
            lines.append(
                f"replica {replica}: " + " -> ".join(f"{node} [{self._span(node)}]" for node in path)
            )
        return "\n".join(lines)

    def _span(self, node: Node) -> str:
        ranks = self.ranks_of(node)
        return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def lanes(topology: Topology, policy: LanePolicy) -> dict[Channel, LaneKey]:
    """Return the lane that carries each channel.

    On each lane a node only sends or only receives.

    Args:
        topology: The topology.
        policy: ``"dedicated"`` gives each channel a lane. ``"paired"`` has two lanes per replica: even stages send on
            pang and receive on ping, odd stages the other way round. If the number of stages is odd, both ends of the
            wraparound link are even stages; its activations use a third lane, last_to_first, its gradients a fourth,
            first_to_last.

    Raises:
        TopologyError: There is no such policy, or two cloud stages between which ``placement`` has a hop are both even
            or both odd, which paired lanes cannot tell apart.
    """
    if policy not in get_args(LanePolicy):
        raise TopologyError(f"lane policy must be 'dedicated' or 'paired', got {policy!r}")
    if policy == "paired":
        check_parity(topology.placement)
    lane_of = dedicated_lane if policy == "dedicated" else paired_lane
    return {channel: lane_of(channel) for channel in topology.channels}
