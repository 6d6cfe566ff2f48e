"""What a step gives back: losses and outputs on the edge, and on every rank how the time was spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ldt.plan import Timeline
from ldt.runtime.execution.recorder import Entry
from ldt.topology import Node, Topology

__all__ = ["StepResult", "StepStats", "Traffic", "merge_timelines"]


class Traffic(NamedTuple):
    """What went over one channel in one step, at this rank's end."""

    messages: int
    bytes: int


@dataclass
class StepStats:
    """One rank's step. Seconds; computing + waiting + idle = seconds. ``rank`` is that of the topology (``Mesh.rank``).

    ``computing``: in chunks, losses and gradient reduction. ``waiting``: blocked on a transfer that was not there yet.
    ``idle``: the rest, that is, waiting for the step to begin and the runtime's own work.
    All are times of the host: on a device with streams (CUDA, NPU) ``computing`` is how long the launches took and
    ``waiting`` is near zero, since there a stream waits, not the host; for times on the device use ``torch.profiler``.
    ``channels`` has payload by channel name, ``lanes`` the counters of ``ldt._C.Lane.stats`` for this step.
    """

    topology: Topology
    rank: int
    seconds: float
    computing: float
    waiting: float
    channels: dict[str, Traffic] = field(default_factory=dict)
    lanes: dict[str, dict[str, float]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    @property
    def node(self) -> Node:
        return self.topology.node_of(self.rank)

    @property
    def idle(self) -> float:
        return max(0.0, self.seconds - self.computing - self.waiting)

    @property
    def timeline(self) -> Timeline:
        """What this node computed; ``merge_timelines`` of all nodes has the transfers too."""
        return merge_timelines([self])

    def to_json(self) -> dict[str, Any]:
        return {
            "topology": self.topology.to_text(),
            "rank": self.rank,
            "seconds": self.seconds,
            "computing": self.computing,
            "waiting": self.waiting,
            "channels": self.channels,
            "lanes": self.lanes,
            "entries": [entry.to_json() for entry in self.entries],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepStats:
        fields = dict(data)
        fields["topology"] = Topology.from_text(fields["topology"])
        fields["channels"] = {name: Traffic(*counts) for name, counts in fields["channels"].items()}
        fields["entries"] = [Entry.from_json(entry) for entry in fields["entries"]]
        fields |= {name: float(fields[name]) for name in ("seconds", "computing", "waiting")}
        return cls(**fields)


def merge_timelines(stats: Sequence[StepStats]) -> Timeline:
    """The measured timeline of one step from its ranks' stats; of each node its leader counts.

    Its clock is the hosts' system time: on one host exact, across hosts as good as their clocks are set.
    """
    records = [
        (s.node, e.action, e.start + (0.0 if e.action.kind.is_comm else e.waited), e.end)
        for s in stats
        if s.topology.leader_of(s.node) == s.rank
        for e in s.entries
    ]
    return Timeline.from_records(stats[0].topology, records)


@dataclass
class StepResult:
    """``loss``, ``losses`` (one per microbatch) and ``outputs`` are None on cloud ranks, and where there are none.

    ``loss`` is the mean over microbatches, or with "token" reduction over tokens, of this replica of the edge alone;
    detached. Gradients are those of the mean over all replicas' microbatches, or tokens.
    """

    stats: StepStats
    loss: torch.Tensor | None = None
    losses: list[torch.Tensor] | None = None
    outputs: list[Any] | None = None
