"""What a mesh is made by: the arguments of connect(), checked and complete."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch

from ldt.runtime.carriers import TransportChoice
from ldt.runtime.strands import Transfers
from ldt.runtime.vigil import Patience
from ldt.topology import LanePolicy, Topology

__all__ = ["Terms"]

_SAME_ON_ALL_RANKS = ("topology", "lanes", "transfer", "transport", "backend", "device")


@dataclass(frozen=True)
class Terms:
    """See ``connect``. ``ranks`` are global ones, in the order of the topology; ``rank`` is this one's place there."""

    topology: Topology
    backend: str | None
    lanes: LanePolicy
    transfers: Transfers
    transport: TransportChoice
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    timeout: timedelta
    transfer_timeout: timedelta
    patience: Patience
    share_edge_errors: bool

    @property
    def settings(self) -> dict[str, str]:
        """What must be the same on all ranks, by the name of its argument."""
        given = (
            self.topology.to_text(),
            self.lanes,
            self.transfers.to_text(),
            self.transport,
            str(self.backend),
            self.device.type,
        )
        return dict(zip(_SAME_ON_ALL_RANKS, given, strict=True))
