"""Results of a step: losses and outputs on the edge, and timing statistics on every rank."""

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
    """Messages and bytes of one channel in one step, counted on this rank."""

    messages: int
    bytes: int


@dataclass
class StepStats:
    """Statistics of one step on one rank. Times are in seconds, and computing + waiting + idle = seconds.

    Attributes:
        rank: The rank in the topology (``Mesh.rank``).
        computing: Time in chunks, losses and gradient reduction.
        waiting: Time blocked on transfers.
        idle: The rest: waiting for the step to begin, and the runtime's own work.
        channels: Payload by channel name, on the wire.
        uncompressed: Its bytes before compression, for channels that compress.
        lanes: The counters of ``ldt._C.Lane.stats`` for this step.
        outages: How often a link between sites was down for 3 s or more and is back, as this rank saw it since the call
            before this one. A rank of another site, or this one, that is stopped for so long counts, too. 0 unless
            ``connect(outage=)``.

    All times are host times. On a device with streams (CUDA, NPU) ``computing`` is how long the launches took, and
    ``waiting`` is near zero because streams wait instead of the host. For times on the device use ``torch.profiler``.
    """

    topology: Topology
    rank: int
    seconds: float
    computing: float
    waiting: float
    channels: dict[str, Traffic] = field(default_factory=dict)
    lanes: dict[str, dict[str, float]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    outages: int = 0
    uncompressed: dict[str, int] = field(default_factory=dict)

    @property
    def node(self) -> Node:
        return self.topology.node_of(self.rank)

    @property
    def idle(self) -> float:
        return max(0.0, self.seconds - self.computing - self.waiting)

    @property
    def timeline(self) -> Timeline:
        """The compute events of this node. ``merge_timelines`` of all nodes has the transfers too."""
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
            "outages": self.outages,
            "uncompressed": self.uncompressed,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepStats:
        fields = dict(data)
        fields["topology"] = Topology.from_text(fields["topology"])
        fields["channels"] = {name: Traffic(*counts) for name, counts in fields["channels"].items()}
        fields["entries"] = [Entry.from_json(entry) for entry in fields["entries"]]
        fields["uncompressed"] = {name: int(size) for name, size in fields["uncompressed"].items()}
        fields |= {name: float(fields[name]) for name in ("seconds", "computing", "waiting")}
        return cls(**fields)


def merge_timelines(stats: Sequence[StepStats]) -> Timeline:
    """Return the measured timeline of one step from the stats of its ranks. Each node's leader counts.

    Times are those of the hosts' system clocks: exact on one host, across hosts as good as clock synchronization.
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
    """The result of ``step`` or ``eval``.

    ``loss``, ``losses`` (one per microbatch) and ``outputs`` are None on cloud ranks and where there are none.
    ``loss`` is detached: the mean over this edge replica's microbatches, their sum with "sum" reduction, or the mean
    over tokens with "token". Gradients are those of the mean, or sum, over all replicas. ``metrics`` has what
    ``loss_fn`` returned beside the loss, by name: a tensor for each microbatch, in order, of those that returned one.
    Empty on cloud ranks. ``auxiliary`` has the losses of ``ldt.add_loss`` by name, combined over microbatches as
    ``loss`` is, without their weights; empty on cloud ranks. ``grad_norm`` is that of a step of ``ldt.Leader`` that
    clips. ``count`` is, on every rank, the sum of the counts that ``loss_fn`` returned with "token" or "root" reduction
    in a step, over all replicas.
    """

    stats: StepStats
    loss: torch.Tensor | None = None
    losses: list[torch.Tensor] | None = None
    outputs: list[Any] | None = None
    metrics: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    auxiliary: dict[str, torch.Tensor] = field(default_factory=dict)
    grad_norm: torch.Tensor | None = None
    count: float | None = None
