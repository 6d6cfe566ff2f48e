"""What the engine moves messages over: a plan's channels as routes, with the queues of their lanes and their links."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ldt.plan.costs import Costs
from ldt.plan.message import Message
from ldt.topology import Channel, Direction, LanePolicy, Node, Topology, lanes

__all__ = ["End", "Flow", "Network"]


class Link:
    """One direction between two nodes: who may send when."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0


class End:
    """One node's end of a lane."""

    __slots__ = ("node", "queue")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.queue: deque[Flow] = deque()


class Flow:
    """A message on its way."""

    __slots__ = ("arrived", "message", "route", "start")

    def __init__(self, message: Message, route: Route) -> None:
        self.message, self.route = message, route
        self.start: float | None = None
        self.arrived = False

    def in_the_way(self) -> tuple[Node, Message] | None:
        """The node and the head of the queue that keeps this message back; None if it has not been sent."""
        sender, receiver = self.route.sender, self.route.receiver
        if self not in sender.queue:
            return None
        blocked = sender if receiver is None or sender.queue[0] is not self else receiver
        return (blocked.node, blocked.queue[0].message) if blocked.queue else None


class Route(NamedTuple):
    """What all messages of a channel share. ``receiver`` is None where receives need no posting."""

    channel: Channel
    sender: End
    receiver: End | None
    link: Link
    occupancy: float
    latency: float


class Network:
    """The routes of a topology under a lane policy (None: a lane for each channel, and no receive to post)."""

    def __init__(self, topology: Topology, costs: Costs, policy: LanePolicy | None) -> None:
        senders: dict[object, End] = {}
        receivers: dict[object, End] = {}
        links: dict[object, Link] = {}
        self._routes: dict[tuple[int, Direction, int], Route] = {}
        self._flows: dict[tuple[int, Direction, int, int], Flow] = {}
        for channel, lane in lanes(topology, policy or "dedicated").items():
            source, target, hop = channel.source, channel.target, channel.hop
            sender = senders.setdefault((lane, source), End(source))
            receiver = receivers.setdefault((lane, target), End(target)) if policy else None
            link = links.setdefault((source, target), Link())
            route = Route(channel, sender, receiver, link, costs.occupancy(hop), costs.delay(hop))
            self._routes[hop, channel.direction, channel.replica] = route

    def flow(self, hop: int, direction: Direction, replica: int, microbatch: int) -> Flow | None:
        """The flow of a message, made at its first mention; None if its hop is local."""
        route = self._routes.get((hop, direction, replica))
        if route is None:
            return None
        key = (hop, direction, replica, microbatch)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = Flow(Message(route.channel, microbatch), route)
        return flow
