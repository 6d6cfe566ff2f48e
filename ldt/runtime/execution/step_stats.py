"""Takes the measure of one step on one rank: wall time, what the executor recorded, what the lanes counted."""

from __future__ import annotations

import time

from ldt._C import Lane
from ldt.runtime.execution.executor import Executor
from ldt.runtime.execution.step_result import StepStats, Traffic
from ldt.runtime.mesh.mesh import Mesh

__all__ = ["StepStatsTaker"]


class StepStatsTaker:
    """Made when a step begins, asked when it has ended."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._start = time.perf_counter()
        self._before = self._counters()

    def take(self, executor: Executor) -> StepStats:
        recorder = executor.recorder
        return StepStats(
            topology=self._mesh.topology,
            rank=self._mesh.rank,
            seconds=time.perf_counter() - self._start,
            computing=recorder.computing,
            waiting=recorder.waiting,
            channels={channel.name: Traffic(*counts) for channel, counts in executor.traffic.items()},
            lanes={
                lane: {name: value - self._before[lane][name] for name, value in counters.items()}
                for lane, counters in self._counters().items()
            },
            entries=recorder.entries,
        )

    def _counters(self) -> dict[str, dict[str, float]]:
        """What each lane has counted since it was made."""
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
