"""IPC links: memory of one rank that another rank of the host writes to, connected before a lane uses it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ldt._C import (
    CopyEngineLinks,
    HostReceiver,
    HostSender,
    IpcPool,
    IpcReceiver,
    IpcSender,
    IsolatedStream,
    LaneError,
    ReceivingEnd,
    SendingEnd,
    SocketLink,
)
from ldt.runtime.comm.group_layout import lane_name
from ldt.runtime.comm.transfer_modes import Stripe, Transfers
from ldt.topology import LaneKey, LanePolicy, Topology, lanes

__all__ = ["AllGather", "IpcLink", "LaneEnds", "LaneId", "connect_ipc_links", "ipc_links"]

LaneId = tuple[LaneKey, Stripe]
AllGather = Callable[[str, Any], Sequence[Any]]
"""Gathers a value, under a name, from every rank of the topology, in topology order."""


class IpcLink(NamedTuple):
    """A link between two ranks of the topology. With ``in_stage`` it forwards what the stage has received."""

    lane: str
    source: int
    target: int
    in_stage: bool

    @property
    def name(self) -> str:
        return f"{self.lane}/{self.source}-{self.target}"


def ipc_links(topology: Topology, policy: LanePolicy, transfers: Transfers) -> dict[LaneId, list[IpcLink]]:
    """The links of each lane, in the same order on all ranks: sender to receiver, then along each receiving stage."""
    links: dict[LaneId, dict[IpcLink, None]] = {}
    for channel, key in lanes(topology, policy).items():
        sources, targets = topology.ranks_of(channel.source), topology.ranks_of(channel.target)
        for stripe in transfers.stripes(channel):
            name = lane_name(key, stripe)
            lane_links = links.setdefault((key, stripe), {})
            lane_links[IpcLink(name, sources[stripe.source], targets[stripe.target], False)] = None
            if not stripe.direct:
                chain = [*targets[stripe.target :], *targets[: stripe.target]]
                lane_links |= {IpcLink(name, *pair, True): None for pair in itertools.pairwise(chain)}
    return {lane: list(found) for lane, found in links.items()}


@dataclass
class LaneEnds:
    """This rank's ends of a lane's IPC links and host links, by the peer's rank in the topology."""

    stream: IsolatedStream | None = None
    memory: IpcPool | None = None
    senders: dict[int, SendingEnd] = field(default_factory=dict)
    receivers: dict[int, ReceivingEnd] = field(default_factory=dict)
    from_stage: IpcReceiver | None = None
    to_stage: IpcSender | None = None

    def offer(self, link: IpcLink, device: torch.device) -> str:
        """Create the receiving end of ``link``. Returns the offer for its sender."""
        self.stream = self.stream or IsolatedStream(device)
        self.memory = self.memory or IpcPool(device)
        receiver = IpcReceiver(self.memory)
        if link.in_stage:
            self.from_stage = receiver
        else:
            self.receivers[link.source] = receiver
        return receiver.offer()

    def accept(self, link: IpcLink, device: torch.device, offer: str) -> None:
        """Create the sending end of ``link`` from the receiver's ``offer``."""
        self.stream = self.stream or IsolatedStream(device)
        if link.in_stage:
            self.memory = self.memory or IpcPool(device)
            self.to_stage = IpcSender(device, offer, self.memory)
        else:
            self.senders[link.target] = IpcSender(device, offer)

    def add_host_end(
        self, link: IpcLink, rank: int, device: torch.device, sockets: SocketLink, lane: int
    ) -> None:
        """Create the end on ``rank`` of a host link over ``sockets``, where the lane has the number ``lane``."""
        self.stream = self.stream or IsolatedStream(device)
        if link.source == rank:
            self.senders[link.target] = HostSender(device, sockets, lane)
        else:
            self.receivers[link.source] = HostReceiver(device, sockets, lane)

    def for_lane(self, members: Sequence[int]) -> CopyEngineLinks:
        """The same ends by group rank. ``members`` are the ranks of the lane's point-to-point group, in its order."""
        assert self.stream is not None, "this rank has no link of the lane"
        return CopyEngineLinks(
            stream=self.stream,
            memory=self.memory,
            senders={members.index(rank): end for rank, end in self.senders.items()},
            receivers={members.index(rank): end for rank, end in self.receivers.items()},
            from_stage=self.from_stage,
            to_stage=self.to_stage,
        )


def connect_ipc_links(
    links: Mapping[LaneId, Sequence[IpcLink]], rank: int, device: torch.device, all_gather: AllGather
) -> tuple[dict[LaneId, LaneEnds], dict[str, str]]:
    """Connect all links. Returns this rank's ends by lane, and why links failed by link name, the same on all ranks.

    Both ends try each link: a device may lack support, processes may be on different hosts or unable to see each other,
    and a driver may refuse to map memory.
    """
    ends: dict[LaneId, LaneEnds] = {lane: LaneEnds() for lane in links}
    offers: dict[str, str] = {}
    failures: dict[str, str] = {}
    for lane, link in _each(links):
        if link.target == rank:
            try:
                offers[link.name] = ends[lane].offer(link, device)
            except LaneError as error:
                failures[link.name] = str(error)
    all_offers = all_gather("offers", offers)
    for lane, link in _each(links):
        if link.source == rank and link.name in all_offers[link.target]:
            try:
                ends[lane].accept(link, device, all_offers[link.target][link.name])
            except LaneError as error:
                failures[link.name] = str(error)
    return ends, {name: text for found in all_gather("failures", failures) for name, text in found.items()}


def _each(links: Mapping[LaneId, Sequence[IpcLink]]) -> Iterator[tuple[LaneId, IpcLink]]:
    return ((lane, link) for lane, lane_links in links.items() for link in lane_links)
