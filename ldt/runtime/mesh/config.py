"""What a mesh is made by: the arguments of connect(), checked and complete."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta

import torch

from ldt.runtime.comm.transfer import Transfers
from ldt.runtime.comm.transports import TransportChoice
from ldt.runtime.health.failure_detector import MIN_HEARTBEAT_TIMEOUT, HealthTimeouts
from ldt.topology import LanePolicy, Topology

__all__ = ["ConnectConfig", "Timeouts"]

_SAME_ON_ALL_RANKS = ("topology", "lanes", "transfer", "transport", "backend", "device")


@dataclass(frozen=True)
class Timeouts:
    """How long ``connect`` and what follows may wait. TypeError and ValueError for what cannot be waited for."""

    timeout: timedelta
    transfer_timeout: timedelta
    heartbeat_timeout: timedelta
    stall_timeout: timedelta

    def __post_init__(self) -> None:
        leasts = {"heartbeat_timeout": MIN_HEARTBEAT_TIMEOUT}
        for name in (field.name for field in fields(self)):
            limit, least = getattr(self, name), leasts.get(name, timedelta(0))
            if not isinstance(limit, timedelta):
                raise TypeError(
                    f"{name} must be a datetime.timedelta, got {limit!r}: write timedelta(seconds=...)"
                )
            if limit <= timedelta(0) or limit < least:
                wanted = f"at least {least}" if least else "positive"
                raise ValueError(f"{name} must be {wanted}, got {limit}")

    @property
    def health(self) -> HealthTimeouts:
        return HealthTimeouts(self.heartbeat_timeout, self.stall_timeout)


@dataclass(frozen=True)
class ConnectConfig:
    """See ``connect``. ``ranks`` are global ones, in the order of the topology; ``rank`` is this one's place there."""

    topology: Topology
    backend: str | None
    lanes: LanePolicy
    transfers: Transfers
    transport: TransportChoice
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    timeouts: Timeouts
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
