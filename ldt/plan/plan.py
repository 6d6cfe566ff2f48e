"""The plan: for each node, the ordered list of its actions. Pure data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from ldt.errors import PlanError
from ldt.plan.action import Action
from ldt.plan.counts import check_num_microbatches
from ldt.plan.files import load
from ldt.plan.text import from_text, to_text
from ldt.topology import Channel, LanePolicy, Node, Topology, listed

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """The actions of every node in one step, in order.

    ``num_microbatches`` is that of each edge replica, which deals them to the cloud replicas it serves
    (``Topology.cloud_replica``): the row of an edge node has all of them, that of a cloud node its share.
    ``lanes`` is the lane policy that the sends and receives were placed for, None for a plan of compute actions
    only. ``training`` is False for forward-only plans. Treat ``rows`` as read-only: plans are shared and
    hashed. The constructor checks only that there is one row per node; ``ldt.plan.verify`` proves the rest.
    """

    topology: Topology
    num_microbatches: int
    rows: Mapping[Node, Sequence[Action]]
    lanes: LanePolicy | None = None
    training: bool = True

    def __post_init__(self) -> None:
        check_num_microbatches(self.num_microbatches)
        if self.lanes is not None and self.lanes not in get_args(LanePolicy):
            raise PlanError(f"lanes must be 'dedicated', 'paired' or None, got {self.lanes!r}")
        if set(self.rows) != set(self.topology.nodes):
            expected, got = (listed(list(nodes)) for nodes in (self.topology.nodes, self.rows))
            raise PlanError(
                f"a plan needs one row per node: expected rows for {expected}, got {got or 'none'}"
            )
        object.__setattr__(self, "rows", {node: tuple(self.rows[node]) for node in self.topology.nodes})

    def __hash__(self) -> int:
        return hash(
            (self.topology, self.num_microbatches, tuple(self.rows.items()), self.lanes, self.training)
        )

    def channel_of(self, action: Action, node: Node) -> Channel:
        """The channel that ``action``, a send or receive in the row of ``node``, uses."""
        if not action.kind.is_comm or action.microbatch is None:
            raise PlanError(f"only sends and receives have a channel, got {action}")
        replica = self.topology.cloud_replica(node, action.microbatch)
        return self.topology.channel(action.hop, action.kind.direction, replica)

    def with_rows(self, rows: Mapping[Node, Sequence[Action]], lanes: LanePolicy | None) -> Plan:
        """Return the same step with other rows, whose sends and receives are placed for ``lanes``."""
        return replace(self, rows=rows, lanes=lanes)

    def to_text(self) -> str:
        """Return header lines, then one CSV line per node. ``from_text`` reads it back into an equal plan."""
        return to_text(self.topology, self.num_microbatches, self.rows, self.lanes, self.training)

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """Read the text of ``to_text``. Raises PlanError naming the invalid line."""
        return cls(*from_text(text))

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(self.to_text(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a file of ``save``. Raises PlanError naming the file if it holds no plan."""
        return load(path, cls.from_text)
