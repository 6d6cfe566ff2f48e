"""The one discrete-event engine: runs the rows of a plan under the lanes' rules, for verify and for simulate.

The rules. A node works through its row in order. A compute action waits for its message from another node;
sends and receives only join their node's queue of their lane and never block the row. A queue is first in,
first out. A message is transferred once it is at the head of its sender's and of its receiver's queue
(rendezvous) and its direction of the link is free; it leaves both queues with its last byte, and arrives a
latency later. A plan without communication runs as if every receive were posted at the start and every
channel had a lane of its own.

Dependencies within a node are not looked at: the order of its row keeps them, which verify checks beforehand.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ldt.plan.action import Action
from ldt.plan.costs import Costs
from ldt.plan.message import Message, message_into, message_out_of
from ldt.plan.plan import Plan
from ldt.topology import Channel, Direction, LanePolicy, Node, lanes

__all__ = ["Computed", "Run", "Stuck", "Transferred", "run"]


class Computed(NamedTuple):
    """A compute action and its times."""

    node: Node
    action: Action
    start: float
    end: float


class Transferred(NamedTuple):
    """A message and its times, from its first byte to its arrival."""

    message: Message
    start: float
    end: float


class Stuck(NamedTuple):
    """Where a node stands (place in its row), what it waits for, and the head of a queue in its way.

    ``behind`` is that queue's node and head, or None if the message has not been sent.
    """

    place: int
    message: Message
    behind: tuple[Node, Message] | None


@dataclass
class Run:
    """What happened, in the order in which it ended, and the nodes that could not go on."""

    computed: list[Computed] = field(default_factory=list)
    transferred: list[Transferred] = field(default_factory=list)
    stuck: dict[Node, Stuck] = field(default_factory=dict)


def run(plan: Plan, costs: Costs, policy: LanePolicy | None) -> Run:
    """Run ``plan`` with its channels on the lanes of ``policy`` (None: a plan of compute actions only)."""
    return _Engine(plan, costs, policy).run()


class _Link:
    """One direction between two nodes: who may send when."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0


class _End:
    """One node's end of a lane."""

    __slots__ = ("node", "queue")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.queue: deque[_Flow] = deque()


class _Flow:
    """A message on its way."""

    __slots__ = ("arrived", "message", "route", "start", "waiter")

    def __init__(self, message: Message, route: _Route) -> None:
        self.message, self.route = message, route
        self.start: float | None = None
        self.arrived = False
        self.waiter: _Worker | None = None


class _Route(NamedTuple):
    """What all messages of a channel share. ``receiver`` is None where receives need no posting."""

    channel: Channel
    sender: _End
    receiver: _End | None
    link: _Link
    occupancy: float
    latency: float


class _Step(NamedTuple):
    """An action ready to run: a post (``end`` is set) or a compute action, which may wait for ``flow``."""

    place: int
    action: Action
    duration: float
    flow: _Flow | None
    end: _End | None


class _Worker:
    """A node working through its row."""

    __slots__ = ("cursor", "node", "start", "steps")

    def __init__(self, node: Node, steps: list[_Step]) -> None:
        self.node, self.steps = node, steps
        self.cursor = 0
        self.start = 0.0


class _Engine:
    def __init__(self, plan: Plan, costs: Costs, policy: LanePolicy | None) -> None:
        self._plan, self._costs = plan, costs
        self._routes = self._make_routes(policy)
        self._flows: dict[tuple[int, Direction, int, int], _Flow] = {}
        self._workers = [_Worker(node, list(self._steps_of(node))) for node in plan.rows]
        self._heap: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        self._sequence = 0
        self._result = Run()

    def run(self) -> Run:
        for worker in self._workers:
            self._advance(worker, 0.0)
        while self._heap:
            now, _, handle, subject = heapq.heappop(self._heap)
            handle(subject, now)
        self._result.stuck = dict(self._find_stuck())
        return self._result

    # -- preparing -------------------------------------------------------------------------------------------

    def _make_routes(self, policy: LanePolicy | None) -> dict[tuple[int, Direction, int], _Route]:
        topology, costs = self._plan.topology, self._costs
        lane_of = lanes(topology, policy or "dedicated")
        senders: dict[object, _End] = {}
        receivers: dict[object, _End] = {}
        links: dict[object, _Link] = {}
        routes = {}
        for channel, lane in lane_of.items():
            source, target, hop = channel.source, channel.target, channel.hop
            sender = senders.setdefault((lane, source), _End(source))
            receiver = receivers.setdefault((lane, target), _End(target)) if policy else None
            link = links.setdefault((source, target), _Link())
            route = _Route(channel, sender, receiver, link, costs.occupancy(hop), costs.delay(hop))
            routes[hop, channel.direction, channel.replica] = route
        return routes

    def _flow(self, hop: int, direction: Direction, replica: int, microbatch: int | None) -> _Flow | None:
        """The flow of a message, made at its first mention; None if its hop is local."""
        route = self._routes.get((hop, direction, replica))
        if route is None or microbatch is None:
            return None
        key = (hop, direction, replica, microbatch)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow(Message(route.channel, microbatch), route)
        return flow

    def _steps_of(self, node: Node) -> Iterator[_Step]:
        for place, action in enumerate(self._plan.rows[node]):
            _, kind, microbatch = action
            if kind.is_compute:
                source = message_into(action)
                flow = self._flow(*source, node.replica, microbatch) if source else None
                yield _Step(place, action, self._costs.compute(action), flow, None)
                if self._plan.lanes is None:
                    target = message_out_of(action)
                    flow = self._flow(*target, node.replica, microbatch) if target else None
                    if flow is not None:
                        yield _Step(place, action, 0.0, flow, flow.route.sender)
            elif kind.is_comm:
                flow = self._flow(action.hop, kind.direction, node.replica, microbatch)
                assert flow is not None, action
                yield _Step(
                    place, action, 0.0, flow, flow.route.sender if kind.is_send else flow.route.receiver
                )

    # -- running ---------------------------------------------------------------------------------------------

    def _at(self, time: float, handle: Callable[[Any, float], None], subject: object) -> None:
        self._sequence += (
            1  # first come, first served among equal times; also keeps the heap from comparing more
        )
        heapq.heappush(self._heap, (time, self._sequence, handle, subject))

    def _advance(self, worker: _Worker, now: float) -> None:
        steps = worker.steps
        while worker.cursor < len(steps):
            _, _, duration, flow, end = steps[worker.cursor]
            if end is None:
                if flow is not None and not flow.arrived:
                    flow.waiter = worker
                    return
                worker.start = now
                self._at(now + duration, self._on_computed, worker)
                return
            assert flow is not None
            end.queue.append(flow)
            worker.cursor += 1
            self._try_transfer(flow, now)

    def _on_computed(self, worker: _Worker, now: float) -> None:
        action = worker.steps[worker.cursor].action
        self._result.computed.append(Computed(worker.node, action, worker.start, now))
        worker.cursor += 1
        self._advance(worker, now)

    def _try_transfer(self, flow: _Flow, now: float) -> None:
        _, sender, receiver, link, occupancy, _ = flow.route
        if flow.start is not None or not sender.queue or sender.queue[0] is not flow:
            return
        if receiver is not None and (not receiver.queue or receiver.queue[0] is not flow):
            return
        flow.start = max(now, link.free_at)
        link.free_at = flow.start + occupancy
        self._at(link.free_at, self._on_left, flow)

    def _on_left(self, flow: _Flow, now: float) -> None:
        for end in (flow.route.sender, flow.route.receiver):
            if end is not None:
                end.queue.popleft()
        self._at(now + flow.route.latency, self._on_arrived, flow)
        for end in (flow.route.sender, flow.route.receiver):
            if end is not None and end.queue:
                self._try_transfer(end.queue[0], now)

    def _on_arrived(self, flow: _Flow, now: float) -> None:
        assert flow.start is not None
        flow.arrived = True
        self._result.transferred.append(Transferred(flow.message, flow.start, now))
        if flow.waiter is not None:
            self._advance(flow.waiter, now)

    # -- when it got stuck -----------------------------------------------------------------------------------

    def _find_stuck(self) -> Iterator[tuple[Node, Stuck]]:
        for worker in self._workers:
            if worker.cursor < len(worker.steps):
                step = worker.steps[worker.cursor]
                assert step.flow is not None
                yield worker.node, Stuck(step.place, step.flow.message, self._in_the_way(step.flow))

    def _in_the_way(self, flow: _Flow) -> tuple[Node, Message] | None:
        sender, receiver = flow.route.sender, flow.route.receiver
        if flow not in sender.queue:
            return None
        blocked = sender if receiver is None or sender.queue[0] is not flow else receiver
        return (blocked.node, blocked.queue[0].message) if blocked.queue else None
