"""What the lanes of a rank are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ldt.runtime.comm.transfer import Transfers
from ldt.topology import LanePolicy, Node, Topology

__all__ = ["LaneLayout"]


@dataclass(frozen=True)
class LaneLayout:
    """The lanes of a topology as ``rank`` sees them. All but ``rank`` and ``groups`` is the same on every rank.

    Args:
        topology: the stages, replicas and laps.
        policy: how channels share lanes.
        transfers: how a message gets to the ranks of a stage, by link.
        rank: this rank's number in the topology.
        groups: this rank's process groups, by name.
        device: where payloads are.
    """

    topology: Topology
    policy: LanePolicy
    transfers: Transfers
    rank: int
    groups: Mapping[str, dist.ProcessGroup]
    device: torch.device

    @property
    def node(self) -> Node:
        return self.topology.node_of(self.rank)
