"""The chain of steps that each microbatch takes, and how early the k-th microbatch can be at each of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ldt.plan.planner.replica_costs import ReplicaCosts

__all__ = ["Counts", "Step", "chain_of", "earliest_starts", "mirrored"]

Counts = tuple[
    int, int, int
]  # how many machines there are of each step on a pipe, on the edge, and elsewhere
_PIPE, _EDGE, _ELSEWHERE = range(3)


class Step(NamedTuple):
    """A forward, a backward or a message. ``start`` is its earliest time, for the first microbatch."""

    machine: object  # the stage, the pipe, or the stages that a link goes between
    level: int  # index of the ``Counts``
    start: float
    duration: float
    weight: float = 0.0  # of the W that may follow

    @property
    def end(self) -> float:
        return self.start + self.duration


def chain_of(costs: ReplicaCosts) -> list[Step]:
    """The steps of one microbatch, in order."""
    steps: list[Step] = []
    now, stages = 0.0, costs.placement
    for chunk, forward in enumerate(costs.forward):
        steps.append(Step(stages[chunk], _level(stages[chunk]), now, forward))
        now += forward
        if chunk < costs.tail:
            pipe, over = costs.forward_pipes[chunk], costs.forwards_over[chunk]
            link = pipe or (stages[chunk], stages[chunk + 1])
            steps.append(Step(link, _ELSEWHERE if pipe is None else _PIPE, now, over))
            now += over + costs.latency[chunk]
    for chunk in reversed(range(costs.num_chunks)):
        weight = 0.0 if costs.weight is None else costs.weight[chunk]
        steps.append(Step(stages[chunk], _level(stages[chunk]), now, costs.backward[chunk], weight))
        now += costs.backward[chunk]
        if hop := chunk:
            pipe, over = costs.backward_pipes[hop - 1], costs.backwards_over[hop - 1]
            link = pipe or (stages[hop], stages[hop - 1])
            steps.append(Step(link, _ELSEWHERE if pipe is None else _PIPE, now, over))
            now += over + costs.latency[hop - 1]
    return steps


def _level(stage: int) -> int:
    return _ELSEWHERE if stage else _EDGE


def mirrored(chain: Sequence[Step]) -> list[Step]:
    """The chain from its end: the start of a step is the least time that remains after it."""
    return [step._replace(start=chain[-1].end - step.end) for step in reversed(chain)]


def earliest_starts(chain: Sequence[Step], counts: Counts, microbatches: int) -> Iterator[list[float]]:
    """Yield per step the least time at which its k-th run can start, for each k from 0.

    Take steps of one machine before it that need w seconds of that machine together, and are w + gap apart from the
    start of the first to the end of the last. k+1 microbatches have passed them, on one of n machines at least
    floor(k / n) + 1. So the last of them trails the earliest time of the first by floor(k / n) * w - gap.
    """
    passed: dict[object, list[Step]] = defaultdict(list)
    turns = {count: [k // count for k in range(microbatches)] for count in counts}
    paces: list[list[tuple[float, float]]] = [[] for _ in counts]  # per level: (w, gap)
    for step in chain:
        if not step.duration and not step.weight:
            yield []
            continue
        rows = [[step.start] * microbatches]
        for count, pairs in zip(counts, paces, strict=True):
            last = (microbatches - 1) // count
            rows += [
                [step.start - gap + turn * work for turn in turns[count]]
                for work, gap in pairs
                if last * work > gap
            ]
        yield list(map(max, *rows)) if len(rows) > 1 else rows[0]
        if step.duration:
            passed[step.machine].append(step)
            work, pairs = 0.0, paces[step.level]
            for first in reversed(passed[step.machine]):
                work += first.duration
                pairs.append((work, max(0.0, step.end - first.start - work)))
            paces[step.level] = list(_undominated(pairs))


def _undominated(pairs: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The pairs of which no other has at least that work and no larger gap."""
    least = float("inf")
    for work, gap in sorted(pairs, key=lambda pair: (-pair[0], pair[1])):
        if gap < least:
            least = gap
            yield work, gap
