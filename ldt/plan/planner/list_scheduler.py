"""Schedules a step by simulating it: a free node takes the first ready and allowed action of its priority list.

Clock and links are those of the engine (``ldt.plan.sim.link``), receive buffers those of its dedicated lanes. So the
times are the simulated ones, except for which of two simultaneous messages takes a link first. Microbatches pass each
chunk in order, so counters are the whole state. That makes it fast enough to try many policies.
"""

from __future__ import annotations

import heapq

from ldt.plan.action import Kind
from ldt.plan.planner.policy import Policy, Schedule, Scheduled
from ldt.plan.planner.replica_costs import ReplicaCosts
from ldt.plan.planner.scheduler_state import ChunkState, NodeState, Queue, scheduler_state
from ldt.plan.sim.link import EventQueue

__all__ = ["schedule"]

_RESOLUTION = 1e-9  # as a share of the critical path: closer events are simultaneous, whatever the rounding


def schedule(costs: ReplicaCosts, num_microbatches: int, policy: Policy) -> Schedule:
    """Schedule a step by ``policy``."""
    return _Scheduler(costs, num_microbatches, policy).run()


class _Scheduler:
    def __init__(self, costs: ReplicaCosts, num_microbatches: int, policy: Policy) -> None:
        self.costs, self.total = costs, num_microbatches
        self.nodes = scheduler_state(costs, num_microbatches, policy)
        self.split = costs.weight is not None
        self.buffers = num_microbatches if policy.limits.buffers is None else policy.limits.buffers
        self.events = EventQueue()  # what happens is the end of an action of that kind
        self.push = self.events.push

    def run(self) -> Schedule:
        heap, nodes = self.events.heap, self.nodes
        resolution = self.costs.critical_path * _RESOLUTION
        now, makespan, left = 0.0, 0.0, self.costs.num_chunks * self.total * (3 if self.split else 2)
        free = {0}
        while True:
            for number in sorted(free):
                self._dispatch(nodes[number], now)
            if not heap:
                return Schedule(
                    [n.scheduled for n in nodes], makespan if left == 0 else float("inf"), self._peaks()
                )
            free.clear()
            horizon = heap[0][0] + resolution
            while heap and heap[0][0] <= horizon:
                now, _, kind, subject = heapq.heappop(heap)
                if isinstance(subject, ChunkState):
                    subject.node.busy = False
                    free.add(subject.node.number)
                    left -= 1
                    makespan = now
                    self._finish(subject, kind, now)
                elif kind is subject.kind:  # a receive
                    subject.arrived += 1
                    if kind is Kind.RECV_F:
                        subject.receiver.count_inputs()
                    else:
                        subject.receiver.count_gradients()
                    free.add(subject.receiver.node.number)
                else:
                    self._on_sent(subject, now)

    def _peaks(self) -> list[int]:
        return [
            max(node.peak for node in self.nodes if node.stage == s) for s in range(self.costs.num_stages)
        ]

    # -- nodes -----------------------------------------------------------------------------------------------

    def _dispatch(self, node: NodeState, now: float) -> None:
        if node.busy:
            return
        for state, kind in node.choices:
            if self._is_ready(state, kind):
                seconds, microbatch = self._start(state, kind)
                node.busy = True
                node.scheduled.append(Scheduled(now + seconds, state.chunk, kind, microbatch))
                self.push(now + seconds, kind, state)
                return

    def _is_ready(self, state: ChunkState, kind: Kind) -> bool:
        if kind is Kind.F:
            return state.forwards < state.inputs and self._admits(state)
        if kind is Kind.W:
            return state.weights_started < state.returned
        return state.backwards < state.gradients and not (state.strict and self._must_wait(state))

    def _admits(self, state: ChunkState) -> bool:
        """Whether the chunk may keep one more microbatch live.

        Room for one microbatch is reserved for each chunk of the node. So the oldest microbatch can always proceed,
        and no limit that leaves that room leads to a deadlock.
        """
        live = state.forwards - state.ended
        if live >= state.window:
            return False
        if state.node.capacity is None or live == 0:
            return True
        return state.node.load + state.size <= state.node.capacity

    def _must_wait(self, state: ChunkState) -> bool:
        """Whether a strict backward must wait for a forward, so that the window is full between the two."""
        return state.forwards < min(state.total, state.backwards + state.window) and self._admits(state)

    def _start(self, state: ChunkState, kind: Kind) -> tuple[float, int]:
        """Start the chunk's next action of ``kind``. Returns its duration in seconds and its microbatch."""
        if kind is Kind.F:
            node = state.node
            node.live += 1
            node.peak = max(node.peak, node.live)
            if state.forwards > state.ended:
                node.load += state.size
            state.forwards += 1
            return state.forward, state.forwards - 1
        if kind is Kind.W:
            state.weights_started += 1
            return state.weight, state.weights_started - 1
        state.backwards += 1
        return state.backward, state.backwards - 1

    def _finish(self, state: ChunkState, kind: Kind, now: float) -> None:
        """Handle the end of the action that the chunk started last."""
        if kind is Kind.F:
            turn = (state.forwards - 1) % state.turns
            self._release_buffer(state.from_below, turn, now)
            self._send(state.up, turn, now)
            if not state.up:  # the tail: its gradient comes from the loss
                state.gradients += 1
            return
        if kind is not Kind.W:
            turn = (state.backwards - 1) % state.turns
            state.returned += 1
            self._release_buffer(state.from_above, turn, now)
            self._send(state.down, turn, now)
        if kind is Kind.W or not self.split:
            state.node.live -= 1
            state.ended += 1
            if state.forwards > state.ended:
                state.node.load -= state.size

    # -- links -----------------------------------------------------------------------------------------------

    def _send(self, queues: list[Queue], turn: int, now: float) -> None:
        if queues:
            queues[turn].ready += 1
            self._transfer(queues[turn], now)

    def _release_buffer(self, queues: list[Queue], turn: int, now: float) -> None:
        if queues:
            queues[turn].used += 1
            self._transfer(queues[turn], now)

    def _on_sent(self, queue: Queue, now: float) -> None:
        queue.leaving = False
        self.push(now + queue.latency, queue.kind, queue)
        self._transfer(queue, now)

    def _transfer(self, queue: Queue, now: float) -> None:
        while queue.started < queue.ready and not queue.leaving:
            if queue.started >= queue.used + self.buffers:
                return
            queue.started += 1
            link = queue.link
            link.take(now, queue.occupancy)
            if link.free_at > now:
                queue.leaving = True
                self.push(link.free_at, Kind.SEND_F if queue.kind is Kind.RECV_F else Kind.SEND_B, queue)
            else:
                self.push(now + queue.latency, queue.kind, queue)
