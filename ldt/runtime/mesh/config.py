"""The checked arguments of connect()."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import timedelta

import torch

from ldt.runtime.comm.compression import Compressions
from ldt.runtime.comm.socket_links import Connections
from ldt.runtime.comm.transfer_modes import Transfers
from ldt.runtime.comm.transports import TransportChoice
from ldt.runtime.health.failure_detector import MIN_HEARTBEAT_TIMEOUT, HealthTimeouts
from ldt.runtime.mesh.reachability import Hosts
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
    outage: timedelta = timedelta(0)

    def __post_init__(self) -> None:
        minimums = {"heartbeat_timeout": MIN_HEARTBEAT_TIMEOUT, "outage": timedelta(0)}
        for name in (limit.name for limit in fields(self)):
            limit = getattr(self, name)
            if not isinstance(limit, timedelta):
                raise TypeError(
                    f"{name} must be a datetime.timedelta, got {limit!r}: write timedelta(seconds=...)"
                )
            if limit < minimums.get(name, timedelta.resolution):
                expected = f"at least {minimums[name]}" if name in minimums else "positive"
                raise ValueError(f"{name} must be {expected}, got {limit}")
        for name in ("transfer_timeout", "stall_timeout"):
            if self.outage and getattr(self, name) <= self.health.silence:
                raise ValueError(
                    f"{name} must be longer than heartbeat_timeout and twice outage, {self.health.silence}, as a "
                    f"link may be down for so long, got {getattr(self, name)}"
                )

    @property
    def health(self) -> HealthTimeouts:
        return HealthTimeouts(self.heartbeat_timeout, self.stall_timeout, outage=self.outage)

    @property
    def outlast(self) -> float:
        """Seconds that connections outlast; 0 where TCP's own limits apply. No transfer may take longer anyway."""
        return self.transfer_timeout.total_seconds() if self.outage else 0.0

    @property
    def connecting(self) -> timedelta:
        """The limit of ``connect``, with the link down meanwhile."""
        return self.timeout + self.health.recovery


@dataclass(frozen=True)
class ConnectConfig:
    """See ``connect``. ``ranks`` has the global ranks in topology order; ``rank`` is this rank's index in it.

    ``hosts`` is known once all ranks have checked in.
    """

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
    hosts: Hosts = field(default_factory=Hosts)

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
