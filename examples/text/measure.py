"""Sums up where the time of a training run goes, on every rank, and gathers it on the edge."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import ldt
from ldt.plan import Costs, Kind, Plan, Timeline, simulate
from ldt.runtime import StepStats, Traffic, merge_timelines

__all__ = ["Measurement", "Meter"]

KEPT = 15  # last steps, whose actions are kept one by one


@dataclass(frozen=True)
class Measurement:
    """The measurements of a run, on the edge.

    ``losses``: of every step. ``totals``: per rank, over all steps, without single actions. ``measured``: the step
    of median length among the last ones. ``planned``: the same step as the plan has it.
    """

    losses: list[float]
    totals: list[StepStats]
    measured: Timeline
    planned: Timeline

    def of_leaders(self) -> list[StepStats]:
        """The totals of one rank of each node."""
        return [stats for stats in self.totals if stats.topology.leader_of(stats.node) == stats.rank]


class Meter:
    """Collects the statistics of each step on one rank."""

    def __init__(self, mesh: ldt.Mesh) -> None:
        self._total = StepStats(mesh.topology, mesh.rank, seconds=0.0, computing=0.0, waiting=0.0)
        self._losses: list[float] = []
        self._kept: deque[StepStats] = deque(maxlen=KEPT)

    def add(self, result: ldt.StepResult) -> None:
        total, stats = self._total, result.stats
        total.seconds += stats.seconds
        total.computing += stats.computing
        total.waiting += stats.waiting
        for name, (messages, size) in stats.channels.items():
            before = total.channels.get(name, Traffic(0, 0))
            total.channels[name] = Traffic(before.messages + messages, before.bytes + size)
        self._kept.append(stats)
        if result.loss is not None:
            self._losses.append(float(result.loss))

    def gather(self, pipeline: ldt.Pipeline, plan: Plan) -> Measurement | None:
        """Gather the measurements of all ranks on the edge. A collective call. ``plan`` is the plan of the steps."""
        totals = pipeline.gather_stats(ldt.StepResult(self._total))
        steps = [pipeline.gather_stats(ldt.StepResult(stats)) for stats in self._kept]
        if totals is None:
            return None
        timelines = sorted(
            (merge_timelines(step) for step in steps if step), key=lambda timeline: timeline.makespan
        )
        median = timelines[len(timelines) // 2]
        return Measurement(self._losses, totals, median, simulate(plan, _costs(timelines)))


def _costs(timelines: Sequence[Timeline]) -> Costs:
    """The median costs of forwards and backwards by chunk, with links that cost nothing."""
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for timeline in timelines:
        for event in timeline.compute:
            seconds[event.action.chunk, event.action.kind].append(event.end - event.start)
    chunks = range(timelines[0].topology.num_chunks)
    forward, backward = (
        [statistics.median(seconds[chunk, kind]) for chunk in chunks] for kind in (Kind.F, Kind.B)
    )
    return Costs(forward, backward)
