"""Edges: memory of one rank that another one of the same host writes to, connected and proven before a lane uses it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ldt._C import LaneError, PeerEdges, PeerMemory, PeerReceiver, PeerSender, PeerStream
from ldt.runtime.groups import lane_name
from ldt.runtime.strands import Strand, Transfers
from ldt.topology import LaneKey, LanePolicy, Topology, lanes

__all__ = ["Edge", "LaneEnds", "LaneId", "Share", "connect_edges", "edges_of"]

LaneId = tuple[LaneKey, Strand]
Share = Callable[[str, Any], Sequence[Any]]
"""Gives what this rank has, under a name, to all ranks of the topology, and returns what each of them gave."""


class Edge(NamedTuple):
    """From rank ``source`` to rank ``target`` of the topology; ``in_stage`` if it passes on what the stage received."""

    lane: str
    source: int
    target: int
    in_stage: bool

    @property
    def name(self) -> str:
        return f"{self.lane}/{self.source}-{self.target}"


def edges_of(topology: Topology, policy: LanePolicy, transfers: Transfers) -> dict[LaneId, list[Edge]]:
    """The edges of each lane, in one order on all ranks: from senders to receivers, and along each receiving stage."""
    edges: dict[LaneId, dict[Edge, None]] = {}
    for channel, key in lanes(topology, policy).items():
        sources, targets = topology.ranks_of(channel.source), topology.ranks_of(channel.target)
        for strand in transfers.strands(channel):
            name = lane_name(key, strand)
            of_lane = edges.setdefault((key, strand), {})
            of_lane[Edge(name, sources[strand.source], targets[strand.target], False)] = None
            if not strand.direct:
                chain = [*targets[strand.target :], *targets[: strand.target]]
                of_lane |= {Edge(name, *pair, True): None for pair in itertools.pairwise(chain)}
    return {lane: list(found) for lane, found in edges.items()}


@dataclass
class LaneEnds:
    """What this rank has of a lane's edges. Peers are ranks of the topology here, and group ranks for the lane."""

    stream: PeerStream | None = None
    memory: PeerMemory | None = None
    senders: dict[int, PeerSender] = field(default_factory=dict)
    receivers: dict[int, PeerReceiver] = field(default_factory=dict)
    from_stage: PeerReceiver | None = None
    to_stage: PeerSender | None = None

    def offer(self, edge: Edge, device: torch.device) -> str:
        """Makes this rank's end of an edge that it is the target of."""
        self.stream = self.stream or PeerStream(device)
        self.memory = self.memory or PeerMemory(device)
        receiver = PeerReceiver(self.memory)
        if edge.in_stage:
            self.from_stage = receiver
        else:
            self.receivers[edge.source] = receiver
        return receiver.offer()

    def accept(self, edge: Edge, device: torch.device, offer: str) -> None:
        """Makes this rank's end of an edge that it is the source of."""
        self.stream = self.stream or PeerStream(device)
        sender = PeerSender(device, offer, self.memory if edge.in_stage else None)
        if edge.in_stage:
            self.to_stage = sender
        else:
            self.senders[edge.target] = sender

    def for_lane(self, members: Sequence[int]) -> PeerEdges:
        """``members`` are the ranks of the lane's point-to-point group, in its order."""
        assert self.stream is not None, "a lane without an edge here"
        return PeerEdges(
            stream=self.stream,
            memory=self.memory,
            senders={members.index(rank): end for rank, end in self.senders.items()},
            receivers={members.index(rank): end for rank, end in self.receivers.items()},
            from_stage=self.from_stage,
            to_stage=self.to_stage,
        )


def connect_edges(
    edges: Mapping[LaneId, Sequence[Edge]], rank: int, device: torch.device, share: Share
) -> tuple[dict[LaneId, LaneEnds], dict[str, str]]:
    """This rank's ends of all lanes, and by the name of an edge why it cannot be: equal on all ranks.

    Both ends of each edge try it: a device may lack what it takes, processes may be on different hosts or may not see
    each other, and a driver may refuse to map memory.
    """
    ends: dict[LaneId, LaneEnds] = {lane: LaneEnds() for lane in edges}
    offers: dict[str, str] = {}
    refusals: dict[str, str] = {}
    for lane, edge in _each(edges):
        if edge.target == rank:
            try:
                offers[edge.name] = ends[lane].offer(edge, device)
            except LaneError as error:
                refusals[edge.name] = str(error)
    offers = {name: offer for theirs in share("offers", offers) for name, offer in theirs.items()}
    for lane, edge in _each(edges):
        if edge.source == rank and edge.name in offers:
            try:
                ends[lane].accept(edge, device, offers[edge.name])
            except LaneError as error:
                refusals[edge.name] = str(error)
    return ends, {name: text for theirs in share("refusals", refusals) for name, text in theirs.items()}


def _each(edges: Mapping[LaneId, Sequence[Edge]]) -> Iterator[tuple[LaneId, Edge]]:
    return ((lane, edge) for lane, of_lane in edges.items() for edge in of_lane)
