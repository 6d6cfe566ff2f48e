"""The trace of a profile: a process for each rank, with what it computed and waited for, and arrows for transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ldt.plan.plots.trace import TraceEvents, describe_node, trace_of
from ldt.runtime.execution.step_result import StepStats, merge_timelines

__all__ = ["profile_trace"]


def profile_trace(
    records: Sequence[Sequence[StepStats]], steps: Sequence[int], clocks: Sequence[float]
) -> dict[str, Any]:
    """The Chrome trace of the recorded ``steps``.

    Args:
        records: By rank, the statistics of each step.
        steps: Their numbers.
        clocks: By how many seconds the clock of each rank is ahead of that of the trace.

    Returns:
        A trace from which ``read_trace`` reads the step of median length. ``otherData["profile"]`` has the steps, the
        second since the epoch in which the trace begins, and ``clocks``.
    """
    topology = records[0][0].topology
    aligned = [
        [_shifted(stats, -ahead) for stats in found] for found, ahead in zip(records, clocks, strict=True)
    ]
    zero = min(entry.start for found in aligned for stats in found for entry in stats.entries)
    trace = TraceEvents(zero)
    for rank in range(len(aligned)):
        node, member = topology.node_of(rank), topology.tp_rank_of(rank)
        trace.add_process(rank, f"rank {rank}: {describe_node(topology, node)}, TP rank {member}")
    leaders = {node: topology.leader_of(node) for node in topology.nodes}
    timelines = [merge_timelines(of_step) for of_step in zip(*aligned, strict=True)]
    for step, timeline in zip(steps, timelines, strict=True):
        trace.add_mark(f"step {step}", timeline.start)
        trace.add_timeline(timeline, leaders)
    for rank, found in enumerate(aligned):
        for step, stats in zip(steps, found, strict=True):
            _add_rank(trace, rank, step, stats, computes=rank not in leaders.values())
    median = sorted(timelines, key=lambda timeline: timeline.makespan)[len(timelines) // 2]
    profile = {"steps": list(steps), "begins": zero, "clocks": list(clocks)}
    return trace_of(trace, median, profile=profile)


def _shifted(stats: StepStats, seconds: float) -> StepStats:
    entries = [
        replace(entry, start=entry.start + seconds, end=entry.end + seconds) for entry in stats.entries
    ]
    return replace(stats, entries=entries)


def _add_rank(trace: TraceEvents, rank: int, step: int, stats: StepStats, computes: bool) -> None:
    """Add where a rank waited, and with ``computes`` what it computed; the timeline has that of leaders."""
    for entry in stats.entries:
        if entry.action.kind.is_comm:
            continue
        begin = entry.start + entry.waited
        if entry.waited > 0:
            trace.add_bar(rank, f"wait for {entry.action}", "wait", entry.start, begin, step=step)
        if computes:
            trace.add_bar(rank, str(entry.action), entry.action.kind.value, begin, entry.end, step=step)
