"""Orders made by playing the step: a node that is free takes the first action of its list that is ready and allowed.

The clock, the links and the receive buffers are those of ``ldt.plan.engine`` with a lane for each channel, so the
times are the simulated ones, but for which of two messages of one moment takes a link first. Microbatches go through
each chunk in their order, so counters are all the state there is, and that is what makes it fast enough to try many
rules.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from ldt.plan.action import Kind
from ldt.plan.chain import Chain

__all__ = ["Limits", "Rules", "Schedule", "Taken", "schedule"]

_RESOLUTION = 1e-9  # of the critical path: events that are closer are at one time, whatever the rounding

_UP, _DOWN, _LEFT_UP, _LEFT_DOWN = Kind.RECV_F, Kind.RECV_B, Kind.SEND_F, Kind.SEND_B


class Taken(NamedTuple):
    """An action and when it ended."""

    end: float
    chunk: int
    kind: Kind
    microbatch: int


class Limits(NamedTuple):
    """What does not depend on the order that is tried.

    ``capacity``: per stage, how much its live activations may weigh together (None: any), with ``weights`` per
    chunk (None: 1 each). ``buffers``: how many messages of a channel may be received ahead of their use (None:
    any).
    """

    capacity: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    buffers: int | None = None


_NO_LIMITS = Limits()


@dataclass(frozen=True)
class Rules:
    """What a node may take and what it prefers.

    ``windows``: per chunk, how many of its microbatches may be live. ``strict``: per chunk, whether a backward
    must wait until the window is full (or no forward is left or allowed), which is one-forward-one-backward.
    ``priorities``: per stage, its chunks' (chunk, kind) pairs, the most urgent first.
    """

    windows: tuple[int, ...]
    strict: tuple[bool, ...]
    priorities: tuple[tuple[tuple[int, Kind], ...], ...]
    limits: Limits = _NO_LIMITS


@dataclass
class Schedule:
    """What was taken, by stage, and the time at which all was done; infinite if the rules led nowhere."""

    taken: list[list[Taken]]
    makespan: float
    peaks: list[int] = field(default_factory=list)  # per stage: activations live at once, at most


def schedule(chain: Chain, num_microbatches: int, rules: Rules) -> Schedule:
    """Play the step by ``rules``."""
    return _Play(chain, num_microbatches, rules).run()


class _Queue:
    """One channel: what is to be sent, and how many messages were started and used."""

    __slots__ = ("chunk", "kind", "latency", "leaving", "link", "occupancy", "ready", "started", "used")

    def __init__(self, chunk: int, kind: Kind, link: list[float], occupancy: float, latency: float) -> None:
        self.chunk, self.kind = chunk, kind  # of its receives
        self.link, self.occupancy, self.latency = link, occupancy, latency
        self.ready = self.started = self.used = 0
        self.leaving = False


class _Play:
    def __init__(self, chain: Chain, num_microbatches: int, rules: Rules) -> None:
        self.chain, self.total, self.rules = chain, num_microbatches, rules
        chunks, stages = chain.num_chunks, chain.num_stages
        self.forwards, self.backwards = [0] * chunks, [0] * chunks  # started
        self.inputs, self.gradients = [0] * chunks, [0] * chunks  # there
        self.returned = [0] * chunks  # backwards ended
        self.weights_started, self.ended = [0] * chunks, [0] * chunks  # ended: nothing of it is live any more
        self.inputs[0] = num_microbatches
        self.load = [sum(self._weight(chunk) for chunk in chain.chunks_of(s)) for s in range(stages)]
        self.live, self.peaks = [0] * stages, [0] * stages
        self.buffers = num_microbatches if rules.limits.buffers is None else rules.limits.buffers
        self.up, self.down = self._queues()
        self.heap: list[tuple[float, int, Kind, int]] = []
        self.sequence = 0

    def _weight(self, chunk: int) -> float:
        return 1.0 if self.rules.limits.weights is None else self.rules.limits.weights[chunk]

    def _queues(self) -> tuple[list[_Queue], list[_Queue]]:
        """Per hop, its channel upwards and downwards."""
        chain, stages = self.chain, self.chain.num_stages
        links: dict[tuple[int, int], list[float]] = {}
        up, down = [], []
        for hop, (occupancy, latency) in enumerate(zip(chain.occupancy, chain.latency, strict=True)):
            below, above = hop % stages, (hop + 1) % stages
            to, back = links.setdefault((below, above), [0.0]), links.setdefault((above, below), [0.0])
            up.append(_Queue(hop + 1, _UP, to, occupancy, latency))
            down.append(_Queue(hop, _DOWN, back, occupancy, latency))
        return up, down

    def run(self) -> Schedule:
        chain, heap, stages = self.chain, self.heap, self.chain.num_stages
        resolution = chain.critical_path * _RESOLUTION
        taken: list[list[Taken]] = [[] for _ in range(stages)]
        busy = [False] * stages
        per_chunk = 2 if chain.weight is None else 3
        now, makespan, left = 0.0, 0.0, chain.num_chunks * self.total * per_chunk
        free = {0}
        while True:
            for stage in sorted(free):
                choice = None if busy[stage] else self._choose(stage)
                if choice is not None:
                    busy[stage] = True
                    end = now + self._start(*choice)
                    taken[stage].append(Taken(end, *choice, self._count(*choice)))
                    self._at(end, choice[1], choice[0])
            if not heap:
                return Schedule(taken, makespan if left == 0 else float("inf"), self.peaks)
            free.clear()
            horizon = heap[0][0] + resolution
            while heap and heap[0][0] <= horizon:
                now, _, kind, chunk = heapq.heappop(heap)
                if kind.is_compute:
                    stage = chunk % stages
                    busy[stage] = False
                    free.add(stage)
                    left -= 1
                    makespan = now
                    self._finish(chunk, kind, now)
                elif kind.is_receive:
                    (self.inputs if kind is _UP else self.gradients)[chunk] += 1
                    free.add(chunk % stages)
                else:
                    self._leave(self.up[chunk] if kind is _LEFT_UP else self.down[chunk], now)

    def _at(self, time: float, kind: Kind, chunk: int) -> None:
        self.sequence += 1  # keeps equal times in their order
        heapq.heappush(self.heap, (time, self.sequence, kind, chunk))

    # -- what a node does ------------------------------------------------------------------------------------

    def _choose(self, stage: int) -> tuple[int, Kind] | None:
        for choice in self.rules.priorities[stage]:
            chunk, kind = choice
            if kind is Kind.F:
                if self.forwards[chunk] < self.inputs[chunk] and self._admits(chunk):
                    return choice
            elif kind is Kind.W:
                if self.weights_started[chunk] < self.returned[chunk]:
                    return choice
            elif self.backwards[chunk] < self.gradients[chunk] and not self._held(chunk):
                return choice
        return None

    def _admits(self, chunk: int) -> bool:
        """Whether one more microbatch of ``chunk`` may be live.

        Each chunk of the stage has room for one kept free at all times. So the oldest microbatch can always go
        on, and no limit that leaves that room leads to a deadlock.
        """
        live = self.forwards[chunk] - self.ended[chunk]
        if live >= self.rules.windows[chunk]:
            return False
        if self.rules.limits.capacity is None or live == 0:
            return True
        stage = chunk % self.chain.num_stages
        return self.load[stage] + self._weight(chunk) <= self.rules.limits.capacity[stage]

    def _held(self, chunk: int) -> bool:
        """Whether a backward waits for a forward, to have the full window live between the two."""
        if not self.rules.strict[chunk]:
            return False
        forwards = self.forwards[chunk]
        full = min(self.total, self.backwards[chunk] + self.rules.windows[chunk])
        return forwards < full and self._admits(chunk)

    def _start(self, chunk: int, kind: Kind) -> float:
        """Take the next action of ``chunk`` and ``kind``: the seconds it will take."""
        chain = self.chain
        if kind is Kind.F:
            stage = chunk % chain.num_stages
            self.live[stage] += 1
            self.peaks[stage] = max(self.peaks[stage], self.live[stage])
            if self.forwards[chunk] > self.ended[chunk]:
                self.load[stage] += self._weight(chunk)
            self.forwards[chunk] += 1
            return chain.forward[chunk]
        if kind is Kind.W:
            assert chain.weight is not None
            self.weights_started[chunk] += 1
            return chain.weight[chunk]
        self.backwards[chunk] += 1
        return chain.backward[chunk]

    def _count(self, chunk: int, kind: Kind) -> int:
        """The microbatch of what was started last."""
        counts = {Kind.F: self.forwards, Kind.W: self.weights_started}.get(kind, self.backwards)
        return counts[chunk] - 1

    def _finish(self, chunk: int, kind: Kind, now: float) -> None:
        if kind is Kind.F:
            if chunk > 0:
                self._use(self.up[chunk - 1], now)
            if chunk == self.chain.tail:
                self.gradients[chunk] += 1
            else:
                self._send(self.up[chunk], now)
            return
        if kind is not Kind.W:
            self.returned[chunk] += 1
            if chunk < self.chain.tail:
                self._use(self.down[chunk], now)
            if chunk > 0:
                self._send(self.down[chunk - 1], now)
        if kind is Kind.W or self.chain.weight is None:
            stage = chunk % self.chain.num_stages
            self.live[stage] -= 1
            self.ended[chunk] += 1
            if self.forwards[chunk] > self.ended[chunk]:
                self.load[stage] -= self._weight(chunk)

    # -- what a link does ------------------------------------------------------------------------------------

    def _send(self, queue: _Queue, now: float) -> None:
        queue.ready += 1
        self._transfer(queue, now)

    def _use(self, queue: _Queue, now: float) -> None:
        queue.used += 1
        self._transfer(queue, now)

    def _leave(self, queue: _Queue, now: float) -> None:
        queue.leaving = False
        self._at(now + queue.latency, queue.kind, queue.chunk)
        self._transfer(queue, now)

    def _transfer(self, queue: _Queue, now: float) -> None:
        while queue.started < queue.ready and not queue.leaving:
            if queue.started >= queue.used + self.buffers:
                return
            queue.started += 1
            if queue.occupancy == 0:
                self._at(now + queue.latency, queue.kind, queue.chunk)
                continue
            queue.leaving = True
            queue.link[0] = max(now, queue.link[0]) + queue.occupancy
            upwards = queue.kind is _UP
            hop = queue.chunk - 1 if upwards else queue.chunk
            self._at(queue.link[0], _LEFT_UP if upwards else _LEFT_DOWN, hop)
