"""The checked arguments of connect()."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta

import torch

from ldt.runtime.comm.compression import Compressions
from ldt.runtime.comm.socket_links import Connections
from ldt.runtime.comm.transfer_modes import Transfers
from ldt.runtime.comm.transports import TransportChoice
from ldt.runtime.health.failure_detector import MIN_HEARTBEAT_TIMEOUT, HealthTimeouts
from ldt.topology import LanePolicy, Topology

__all__ = ["ConnectConfig", "Timeouts"]

_EQUAL_ON_ALL_RANKS = (
    "topology",
    "lanes",
    "transfer",
    "transport",
    "compression",
    "backend",
    "device",
    "connections",
)


@dataclass(frozen=True)
class Timeouts:
    """The timeouts of ``connect``. Raises TypeError or ValueError for one that is no timedelta or too short."""

    timeout: timedelta
    transfer_timeout: timedelta
    heartbeat_timeout: timedelta
    stall_timeout: timedelta

    def __post_init__(self) -> None:
        minimums = {"heartbeat_timeout": MIN_HEARTBEAT_TIMEOUT}
        for name in (field.name for field in fields(self)):
            limit, minimum = getattr(self, name), minimums.get(name, timedelta(0))
            if not isinstance(limit, timedelta):
                raise TypeError(
                    f"{name} must be a datetime.timedelta, got {limit!r}: write timedelta(seconds=...)"
                )
            if limit <= timedelta(0) or limit < minimum:
                expected = f"at least {minimum}" if minimum else "positive"
                raise ValueError(f"{name} must be {expected}, got {limit}")

    @property
    def health(self) -> HealthTimeouts:
        return HealthTimeouts(self.heartbeat_timeout, self.stall_timeout)


@dataclass(frozen=True)
class ConnectConfig:
    """See ``connect``. ``ranks`` has the global ranks in topology order; ``rank`` is this rank's index in it."""

    topology: Topology
    backend: str | None
    lanes: LanePolicy
    transfers: Transfers
    transport: TransportChoice
    compressions: Compressions
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    timeouts: Timeouts
    share_edge_errors: bool
    connections: Connections | None = None

    @property
    def settings(self) -> dict[str, str]:
        """The values that must be equal on all ranks, by argument."""
        values = (
            self.topology.to_text(),
            self.lanes,
            self.transfers.to_text(),
            self.transport,
            self.compressions.to_text(),
            str(self.backend),
            self.device.type,
            str(self.connections),
        )
        return dict(zip(_EQUAL_ON_ALL_RANKS, values, strict=True))
