"""Simulates the rows of a plan with discrete events under the rules of lanes. Used by verify and simulate.

Rules: A node runs its row in order. A compute action waits for its message from another node; sends and receives only
join their node's queue of their lane and never block the row. A queue is first in, first out. A message is transferred
once it is at the head of its sender's and of its receiver's queue (rendezvous) and its pipe is free, which messages
take in the order in which they become ready; it leaves both queues with its last byte, and arrives a latency later. A
reduction is a barrier: it blocks its row until every replica of the stage has reached it. In a lockstep stage every
compute action is a barrier too, once its message has arrived. A plan without communication runs as if every receive
were posted at the start and every channel had its own lane.

The engine ignores dependencies within a node: verify checks beforehand that the order of its row satisfies them.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from ldt.plan.action import Action
from ldt.plan.costs import Costs
from ldt.plan.message import Message, message_into, message_out_of
from ldt.plan.plan import Plan
from ldt.plan.sim.link import EventQueue
from ldt.plan.sim.network import Flow, LaneQueue, Network
from ldt.topology import LanePolicy, Node

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
    """A node's ``position`` in its row and what it waits for: a message, or other replicas at a barrier.

    ``blocked_by`` is the node and the head of the queue that blocks the message, None if it has not been sent.
    ``missing`` are the replicas that have not reached the barrier.
    """

    position: int
    message: Message | None = None
    blocked_by: tuple[Node, Message] | None = None
    missing: tuple[Node, ...] = ()


@dataclass
class Run:
    """Compute actions and transfers in the order in which they ended, and the nodes that are stuck."""

    computed: list[Computed] = field(default_factory=list)
    transferred: list[Transferred] = field(default_factory=list)
    stuck: dict[Node, Stuck] = field(default_factory=dict)


def run(plan: Plan, costs: Costs, policy: LanePolicy | None, lockstep: Collection[int] = ()) -> Run:
    """Run ``plan`` with its channels on the lanes of ``policy`` (None: a plan of compute actions only).

    For the stages in ``lockstep`` each compute action is a barrier of the replicas.
    """
    return _Engine(plan, costs, policy, lockstep).run()


class _Barrier:
    """The reduction of one chunk, or an action in lockstep, and the replicas that have reached it."""

    __slots__ = ("expected", "reached")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.reached: list[_Worker] = []


class _Step(NamedTuple):
    """An action: a send or receive (``queue`` is set), a reduction (only ``barrier`` is set) or compute.

    A compute action may have to wait for ``flow``, then for the other replicas at ``barrier``.
    """

    position: int
    action: Action
    duration: float = 0.0
    flow: Flow | None = None
    queue: LaneQueue | None = None
    barrier: _Barrier | None = None


class _Worker:
    """A node that runs its row."""

    __slots__ = ("cursor", "node", "start", "steps")

    def __init__(self, node: Node, steps: list[_Step]) -> None:
        self.node, self.steps = node, steps
        self.cursor = 0
        self.start = 0.0


class _Engine:
    def __init__(
        self, plan: Plan, costs: Costs, policy: LanePolicy | None, lockstep: Collection[int]
    ) -> None:
        self._plan, self._costs, self._lockstep = plan, costs, lockstep
        self._network = Network(plan.topology, costs, policy)
        # By chunk, or by stage and index of the compute action.
        self._barriers: dict[Hashable, _Barrier] = {}
        self._waiting: dict[Flow, _Worker] = {}
        self._workers = [_Worker(node, list(self._steps_of(node))) for node in plan.rows]
        self._events = EventQueue()  # what happens is a method of this class
        self._push = self._events.push
        self._result = Run()

    def run(self) -> Run:
        for worker in self._workers:
            self._advance(worker, 0.0)
        while self._events.heap:
            now, _, handle, subject = heapq.heappop(self._events.heap)
            handle(subject, now)
        self._result.stuck = dict(self._find_stuck())
        return self._result

    def _steps_of(self, node: Node) -> Iterator[_Step]:
        network, topology = self._network, self._plan.topology
        turns = count() if node.stage in self._lockstep else None
        for position, action in enumerate(self._plan.rows[node]):
            chunk, kind, microbatch = action
            if microbatch is None:
                yield _Step(position, action, barrier=self._barrier(node, chunk))
                continue
            replica = topology.cloud_replica(node, microbatch)
            if kind.is_compute:
                source = message_into(action)
                flow = network.flow(*source, replica, microbatch) if source else None
                barrier = None if turns is None else self._barrier(node, (node.stage, next(turns)))
                yield _Step(position, action, self._costs.compute(action, node), flow, barrier=barrier)
                if self._plan.lanes is None:
                    target = message_out_of(action)
                    flow = network.flow(*target, replica, microbatch) if target else None
                    if flow is not None:
                        yield _Step(position, action, flow=flow, queue=flow.route.sender)
            else:
                flow = network.flow(action.hop, kind.direction, replica, microbatch)
                assert flow is not None, action
                queue = flow.route.sender if kind.is_send else flow.route.receiver
                yield _Step(position, action, flow=flow, queue=queue)

    def _barrier(self, node: Node, key: Hashable) -> _Barrier:
        return self._barriers.setdefault(key, _Barrier(self._plan.topology.replicas(node.stage)))

    # -- running ---------------------------------------------------------------------------------------------

    def _advance(self, worker: _Worker, now: float) -> None:
        steps = worker.steps
        while worker.cursor < len(steps):
            _, _, _, flow, queue, barrier = steps[worker.cursor]
            if queue is None:
                if flow is not None and not flow.arrived:
                    self._waiting[flow] = worker
                elif barrier is not None:
                    self._join(barrier, worker, now)
                else:
                    self._start(worker, now)
                return
            assert flow is not None
            queue.flows.append(flow)
            worker.cursor += 1
            self._try_transfer(flow, now)

    def _join(self, barrier: _Barrier, worker: _Worker, now: float) -> None:
        barrier.reached.append(worker)
        if len(barrier.reached) == barrier.expected:
            for replica in barrier.reached:
                self._push(now, self._start, replica)

    def _start(self, worker: _Worker, now: float) -> None:
        _, action, duration, *_ = worker.steps[worker.cursor]
        if action.kind.is_compute:
            worker.start = now
            self._push(now + duration, self._on_computed, worker)
        else:  # a reduction, which takes no time in this model
            worker.cursor += 1
            self._advance(worker, now)

    def _on_computed(self, worker: _Worker, now: float) -> None:
        action = worker.steps[worker.cursor].action
        self._result.computed.append(Computed(worker.node, action, worker.start, now))
        worker.cursor += 1
        self._advance(worker, now)

    def _try_transfer(self, flow: Flow, now: float) -> None:
        _, sender, receiver, link, occupancy, _ = flow.route
        if flow.start is not None or not sender.flows or sender.flows[0] is not flow:
            return
        if receiver is not None and (not receiver.flows or receiver.flows[0] is not flow):
            return
        flow.start = link.take(now, occupancy)
        self._push(link.free_at, self._on_sent, flow)

    def _on_sent(self, flow: Flow, now: float) -> None:
        for queue in (flow.route.sender, flow.route.receiver):
            if queue is not None:
                queue.flows.popleft()
        self._push(now + flow.route.latency, self._on_arrived, flow)
        for queue in (flow.route.sender, flow.route.receiver):
            if queue is not None and queue.flows:
                self._try_transfer(queue.flows[0], now)

    def _on_arrived(self, flow: Flow, now: float) -> None:
        assert flow.start is not None
        flow.arrived = True
        self._result.transferred.append(Transferred(flow.message, flow.start, now))
        waiter = self._waiting.pop(flow, None)
        if waiter is not None:
            self._advance(waiter, now)

    # -- deadlocks -------------------------------------------------------------------------------------------

    def _find_stuck(self) -> Iterator[tuple[Node, Stuck]]:
        for worker in self._workers:
            if worker.cursor == len(worker.steps):
                continue
            step = worker.steps[worker.cursor]
            if step.barrier is not None and worker in step.barrier.reached:
                reached = [replica.node for replica in step.barrier.reached]
                stage = [other.node for other in self._workers if other.node.stage == worker.node.stage]
                yield worker.node, Stuck(step.position, missing=tuple(n for n in stage if n not in reached))
            else:
                assert step.flow is not None
                yield worker.node, Stuck(step.position, step.flow.message, step.flow.blocked_by())
