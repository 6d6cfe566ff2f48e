"""Collects the statistics of one step on one rank: wall time, recorded actions, lane counters."""

from __future__ import annotations

import time

from ldt._C import Lane
from ldt.runtime.execution.executor import Executor
from ldt.runtime.execution.step_result import StepStats, Traffic
from ldt.runtime.mesh.mesh import Mesh

__all__ = ["StepStatsCollector"]


class StepStatsCollector:
    """Create one when a step begins and call ``collect`` when it has ended."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._start = time.perf_counter()
        self._before = self._counters()

    def collect(self, executor: Executor) -> StepStats:
        recorder = executor.recorder
        return StepStats(
            topology=self._mesh.topology,
            rank=self._mesh.rank,
            seconds=time.perf_counter() - self._start,
            computing=recorder.computing,
            waiting=recorder.waiting,
            channels={channel.name: Traffic(*counts[:2]) for channel, counts in executor.traffic.items()},
            uncompressed={
                channel.name: before
                for channel, (_, sent, before) in executor.traffic.items()
                if before != sent
            },
            lanes={
                lane: {name: value - self._before[lane][name] for name, value in counters.items()}
                for lane, counters in self._counters().items()
            },
            entries=recorder.entries,
            outages=self._mesh.detector.outages.take(),
        )

    def _counters(self) -> dict[str, dict[str, float]]:
        """The counters of each lane since it was created."""
        return {lane.name: _numbers(lane) for lane in self._mesh.all_lanes()}


def _numbers(lane: Lane) -> dict[str, float]:
    kept = (
        "sent_bytes",
        "sent_messages",
        "received_bytes",
        "received_messages",
        "broadcast_bytes",
        "wait_seconds",
    )
    stats = lane.stats()
    return {name: float(stats[name]) for name in kept}
