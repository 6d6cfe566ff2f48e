"""The settings that a rank's lanes are built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ldt.runtime.comm.transfer_modes import Transfers
from ldt.topology import LanePolicy, Node, Topology

__all__ = ["LaneLayout"]


@dataclass(frozen=True)
class LaneLayout:
    """The lanes of a topology as ``rank`` sees them. All fields but ``rank`` and ``groups`` are the same on every rank.

    Args:
        topology: The stages, replicas and laps.
        policy: How channels share lanes.
        transfers: The transfer mode of each link.
        rank: This rank's index in the topology.
        groups: This rank's process groups, by name.
        device: The device of the payloads.
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
