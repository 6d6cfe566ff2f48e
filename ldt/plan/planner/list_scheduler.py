"""Orders made by playing the step: a node that is free takes the first action of its list that is ready and allowed.

The clock, the links and the receive buffers are those of ``ldt.plan.sim.engine`` with a lane for each channel, so the
times are the simulated ones, but for which of two messages of one moment takes a link first. Microbatches go through
each chunk in their order, so counters are all the state there is, and that is what makes it fast enough to try many
rules.
"""

from __future__ import annotations

import heapq

from ldt.plan.action import Kind
from ldt.plan.planner.policy import Rules, Schedule, Taken
from ldt.plan.planner.replica_costs import Chain
from ldt.plan.planner.scheduler_state import GridNode, Place, Queue, grid

__all__ = ["schedule"]

_RESOLUTION = 1e-9  # of the critical path: events that are closer are at one time, whatever the rounding


def schedule(chain: Chain, num_microbatches: int, rules: Rules) -> Schedule:
    """Play the step by ``rules``."""
    return _Play(chain, num_microbatches, rules).run()


class _Play:
    def __init__(self, chain: Chain, num_microbatches: int, rules: Rules) -> None:
        self.chain, self.total = chain, num_microbatches
        self.nodes = grid(chain, num_microbatches, rules)
        self.split = chain.weight is not None
        self.buffers = num_microbatches if rules.limits.buffers is None else rules.limits.buffers
        self.heap: list[tuple[float, int, Kind, Place | Queue]] = []
        self.sequence = 0

    def run(self) -> Schedule:
        heap, nodes = self.heap, self.nodes
        resolution = self.chain.critical_path * _RESOLUTION
        now, makespan, left = 0.0, 0.0, self.chain.num_chunks * self.total * (3 if self.split else 2)
        free = {0}
        while True:
            for number in sorted(free):
                self._go_on(nodes[number], now)
            if not heap:
                return Schedule(
                    [n.taken for n in nodes], makespan if left == 0 else float("inf"), self._peaks()
                )
            free.clear()
            horizon = heap[0][0] + resolution
            while heap and heap[0][0] <= horizon:
                now, _, kind, subject = heapq.heappop(heap)
                if isinstance(subject, Place):
                    subject.node.busy = False
                    free.add(subject.node.number)
                    left -= 1
                    makespan = now
                    self._finish(subject, kind, now)
                elif kind.is_receive:
                    subject.arrived += 1
                    if kind is Kind.RECV_F:
                        subject.place.count_inputs()
                    else:
                        subject.place.count_gradients()
                    free.add(subject.place.node.number)
                else:
                    self._leave(subject, now)

    def _peaks(self) -> list[int]:
        return [
            max(node.peak for node in self.nodes if node.stage == s) for s in range(self.chain.num_stages)
        ]

    def _at(self, time: float, kind: Kind, subject: Place | Queue) -> None:
        self.sequence += 1  # keeps equal times in their order
        heapq.heappush(self.heap, (time, self.sequence, kind, subject))

    # -- what a node does ------------------------------------------------------------------------------------

    def _go_on(self, node: GridNode, now: float) -> None:
        if node.busy:
            return
        for place, kind in node.choices:
            if self._possible(place, kind):
                seconds, microbatch = self._start(place, kind)
                node.busy = True
                node.taken.append(Taken(now + seconds, place.chunk, kind, microbatch))
                self._at(now + seconds, kind, place)
                return

    def _possible(self, place: Place, kind: Kind) -> bool:
        if kind is Kind.F:
            return place.forwards < place.inputs and self._admits(place)
        if kind is Kind.W:
            return place.weights_started < place.returned
        return place.backwards < place.gradients and not (place.strict and self._held(place))

    def _admits(self, place: Place) -> bool:
        """Whether one more microbatch may be live at a place.

        Each chunk of the node has room for one kept free at all times. So the oldest microbatch can always go
        on, and no limit that leaves that room leads to a deadlock.
        """
        live = place.forwards - place.ended
        if live >= place.window:
            return False
        if place.node.capacity is None or live == 0:
            return True
        return place.node.load + place.size <= place.node.capacity

    def _held(self, place: Place) -> bool:
        """Whether a strict backward waits for a forward, to have the full window live between the two."""
        return place.forwards < min(place.total, place.backwards + place.window) and self._admits(place)

    def _start(self, place: Place, kind: Kind) -> tuple[float, int]:
        """Take the next action of a place and kind: the seconds it will take, and its microbatch."""
        if kind is Kind.F:
            node = place.node
            node.live += 1
            node.peak = max(node.peak, node.live)
            if place.forwards > place.ended:
                node.load += place.size
            place.forwards += 1
            return place.forward, place.forwards - 1
        if kind is Kind.W:
            place.weights_started += 1
            return place.weight, place.weights_started - 1
        place.backwards += 1
        return place.backward, place.backwards - 1

    def _finish(self, place: Place, kind: Kind, now: float) -> None:
        """What follows from the end of the action that was started last."""
        if kind is Kind.F:
            turn = (place.forwards - 1) % place.turns
            self._use(place.from_below, turn, now)
            self._send(place.up, turn, now)
            if not place.up:  # the tail, whose loss gives its own gradient
                place.gradients += 1
            return
        if kind is not Kind.W:
            turn = (place.backwards - 1) % place.turns
            place.returned += 1
            self._use(place.from_above, turn, now)
            self._send(place.down, turn, now)
        if kind is Kind.W or not self.split:
            place.node.live -= 1
            place.ended += 1
            if place.forwards > place.ended:
                place.node.load -= place.size

    # -- what a link does ------------------------------------------------------------------------------------

    def _send(self, queues: list[Queue], turn: int, now: float) -> None:
        if queues:
            queues[turn].ready += 1
            self._transfer(queues[turn], now)

    def _use(self, queues: list[Queue], turn: int, now: float) -> None:
        if queues:
            queues[turn].used += 1
            self._transfer(queues[turn], now)

    def _leave(self, queue: Queue, now: float) -> None:
        queue.leaving = False
        self._at(now + queue.latency, queue.kind, queue)
        self._transfer(queue, now)

    def _transfer(self, queue: Queue, now: float) -> None:
        while queue.started < queue.ready and not queue.leaving:
            if queue.started >= queue.used + self.buffers:
                return
            queue.started += 1
            if queue.occupancy == 0:
                self._at(now + queue.latency, queue.kind, queue)
                continue
            queue.leaving = True
            queue.link[0] = max(now, queue.link[0]) + queue.occupancy
            self._at(queue.link[0], Kind.SEND_F if queue.kind is Kind.RECV_F else Kind.SEND_B, queue)
