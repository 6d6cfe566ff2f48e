"""Routes: memory of one rank that another one of the same host writes to, connected before a lane uses it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ldt._C import IpcLinks, IpcPool, IpcReceiver, IpcSender, IsolatedStream, LaneError
from ldt.runtime.comm.group_layout import lane_name
from ldt.runtime.comm.transfer import Stripe, Transfers
from ldt.topology import LaneKey, LanePolicy, Topology, lanes

__all__ = ["AllGather", "IpcLink", "LaneId", "LaneIpcLinks", "connect_ipc_links", "ipc_links"]

LaneId = tuple[LaneKey, Stripe]
AllGather = Callable[[str, Any], Sequence[Any]]
"""Gives what this rank has, under a name, to all ranks of the topology, and returns what each of them gave."""


class IpcLink(NamedTuple):
    """From rank ``source`` to rank ``target`` of the topology; ``in_stage`` if it passes on what the stage received."""

    lane: str
    source: int
    target: int
    in_stage: bool

    @property
    def name(self) -> str:
        return f"{self.lane}/{self.source}-{self.target}"


def ipc_links(topology: Topology, policy: LanePolicy, transfers: Transfers) -> dict[LaneId, list[IpcLink]]:
    """The routes of each lane, in one order on all ranks: from senders to receivers, and along each receiving stage."""
    routes: dict[LaneId, dict[IpcLink, None]] = {}
    for channel, key in lanes(topology, policy).items():
        sources, targets = topology.ranks_of(channel.source), topology.ranks_of(channel.target)
        for stripe in transfers.stripes(channel):
            name = lane_name(key, stripe)
            of_lane = routes.setdefault((key, stripe), {})
            of_lane[IpcLink(name, sources[stripe.source], targets[stripe.target], False)] = None
            if not stripe.direct:
                chain = [*targets[stripe.target :], *targets[: stripe.target]]
                of_lane |= {IpcLink(name, *pair, True): None for pair in itertools.pairwise(chain)}
    return {lane: list(found) for lane, found in routes.items()}


@dataclass
class LaneIpcLinks:
    """What this rank has of a lane's routes. Peers are ranks of the topology here, and group ranks for the lane."""

    stream: IsolatedStream | None = None
    memory: IpcPool | None = None
    senders: dict[int, IpcSender] = field(default_factory=dict)
    receivers: dict[int, IpcReceiver] = field(default_factory=dict)
    from_stage: IpcReceiver | None = None
    to_stage: IpcSender | None = None

    def offer(self, route: IpcLink, device: torch.device) -> str:
        """Makes this rank's end of a route that it is the target of."""
        self.stream = self.stream or IsolatedStream(device)
        self.memory = self.memory or IpcPool(device)
        receiver = IpcReceiver(self.memory)
        if route.in_stage:
            self.from_stage = receiver
        else:
            self.receivers[route.source] = receiver
        return receiver.offer()

    def accept(self, route: IpcLink, device: torch.device, offer: str) -> None:
        """Makes this rank's end of a route that it is the source of."""
        self.stream = self.stream or IsolatedStream(device)
        sender = IpcSender(device, offer, self.memory if route.in_stage else None)
        if route.in_stage:
            self.to_stage = sender
        else:
            self.senders[route.target] = sender

    def for_lane(self, members: Sequence[int]) -> IpcLinks:
        """``members`` are the ranks of the lane's point-to-point group, in its order."""
        assert self.stream is not None, "a lane without a route here"
        return IpcLinks(
            stream=self.stream,
            memory=self.memory,
            senders={members.index(rank): end for rank, end in self.senders.items()},
            receivers={members.index(rank): end for rank, end in self.receivers.items()},
            from_stage=self.from_stage,
            to_stage=self.to_stage,
        )


def connect_ipc_links(
    routes: Mapping[LaneId, Sequence[IpcLink]], rank: int, device: torch.device, share: AllGather
) -> tuple[dict[LaneId, LaneIpcLinks], dict[str, str]]:
    """This rank's ends of all lanes, and by the name of a route why it cannot be: equal on all ranks.

    Both ends of each route try it: a device may lack what it takes, processes may be on different hosts or may not see
    each other, and a driver may refuse to map memory.
    """
    ends: dict[LaneId, LaneIpcLinks] = {lane: LaneIpcLinks() for lane in routes}
    offers: dict[str, str] = {}
    refusals: dict[str, str] = {}
    for lane, route in _each(routes):
        if route.target == rank:
            try:
                offers[route.name] = ends[lane].offer(route, device)
            except LaneError as error:
                refusals[route.name] = str(error)
    given = share("offers", offers)
    for lane, route in _each(routes):
        if route.source == rank and route.name in given[route.target]:
            try:
                ends[lane].accept(route, device, given[route.target][route.name])
            except LaneError as error:
                refusals[route.name] = str(error)
    return ends, {name: text for theirs in share("refusals", refusals) for name, text in theirs.items()}


def _each(routes: Mapping[LaneId, Sequence[IpcLink]]) -> Iterator[tuple[LaneId, IpcLink]]:
    return ((lane, route) for lane, of_lane in routes.items() for route in of_lane)
