"""The network of the engine: the channels of a plan as routes, with their lanes' queues and the pipes they share."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ldt.plan.costs import Costs
from ldt.plan.message import Message
from ldt.plan.sim.link import Link
from ldt.topology import Channel, Direction, LanePolicy, Node, Topology, lanes

__all__ = ["Flow", "LaneQueue", "Network"]


class LaneQueue:
    """One node's queue of a lane."""

    __slots__ = ("flows", "node")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.flows: deque[Flow] = deque()


class Flow:
    """A message in flight."""

    __slots__ = ("arrived", "message", "route", "start")

    def __init__(self, message: Message, route: Route) -> None:
        self.message, self.route = message, route
        self.start: float | None = None
        self.arrived = False

    def blocked_by(self) -> tuple[Node, Message] | None:
        """The node and the head of the queue that blocks this message; None if it has not been sent."""
        sender, receiver = self.route.sender, self.route.receiver
        if self not in sender.flows:
            return None
        blocked = sender if receiver is None or sender.flows[0] is not self else receiver
        return (blocked.node, blocked.flows[0].message) if blocked.flows else None


class Route(NamedTuple):
    """Properties common to all messages of a channel. ``receiver`` is None if receives need not be posted."""

    channel: Channel
    sender: LaneQueue
    receiver: LaneQueue | None
    link: Link
    occupancy: float
    latency: float


class Network:
    """The routes of a topology under a lane policy (None: a lane per channel, and receives need no posting)."""

    def __init__(self, topology: Topology, costs: Costs, policy: LanePolicy | None) -> None:
        senders: dict[object, LaneQueue] = {}
        receivers: dict[object, LaneQueue] = {}
        links: dict[object, Link] = {}
        self._routes: dict[tuple[int, Direction, int], Route] = {}
        self._flows: dict[tuple[int, Direction, int, int], Flow] = {}
        for channel, lane in lanes(topology, policy or "dedicated").items():
            source, target, hop = channel.source, channel.target, channel.hop
            sender = senders.setdefault((lane, source), LaneQueue(source))
            receiver = receivers.setdefault((lane, target), LaneQueue(target)) if policy else None
            link = links.setdefault(topology.pipe_of(channel), Link())
            occupancy = costs.occupancy(hop, channel.direction, up=source.stage < target.stage)
            route = Route(channel, sender, receiver, link, occupancy, costs.delay(hop))
            self._routes[hop, channel.direction, channel.replica] = route

    def flow(self, hop: int, direction: Direction, replica: int, microbatch: int) -> Flow | None:
        """Return the flow of a message, created on first use; None if its hop is local."""
        route = self._routes.get((hop, direction, replica))
        if route is None:
            return None
        key = (hop, direction, replica, microbatch)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = Flow(Message(route.channel, microbatch), route)
        return flow
