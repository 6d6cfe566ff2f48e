"""Measures for transfer="auto" from which size on "scatter" is faster than "leader", link by link."""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

from ldt.runtime.comm.endpoint import Endpoint
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.mesh.probe_tasks import round_trips, run_tasks
from ldt.topology import Channel

__all__ = ["SIZES", "Line", "crossover", "tune_transfers"]

SIZES = (64 << 10, 4 << 20)
_REPEATS = 3  # the first may be slow
_MIN_SPEEDUP = 1.1  # per byte; less may be noise


class Line(NamedTuple):
    """Seconds for a message of n bytes: ``start + n * per_byte``."""

    start: float
    per_byte: float

    @classmethod
    def through(cls, small: float, large: float) -> Line:
        """The line through the times of a message of each of ``SIZES``."""
        per_byte = max(0.0, large - small) / (SIZES[1] - SIZES[0])
        return cls(small - per_byte * SIZES[0], per_byte)


def crossover(leader: Line, scatter: Line) -> float:
    """The bytes from which on ``scatter`` is faster; infinite if it is less than a tenth faster per byte."""
    if scatter.per_byte * _MIN_SPEEDUP > leader.per_byte or leader.per_byte == 0.0:
        return math.inf
    return max(0.0, (scatter.start - leader.start) / (leader.per_byte - scatter.per_byte))


def tune_transfers(mesh: Mesh, deadline: float) -> dict[Channel, Endpoint]:
    """Return this rank's tuned endpoints of the channels that are "auto". A collective call of all ranks.

    Measures one link after the other, each pair of stages once, by 12 round trips: a message of up to 4 MiB there, one
    byte back. The result also holds for the opposite direction and for all replicas. Raises LdtError if ``deadline``
    (``time.monotonic()``) passes, RemoteStageError if another rank failed.
    """
    crossovers: dict[frozenset[int], float] = {}
    endpoints = {}
    for channel in mesh.topology.channels:
        if mesh.transfers.mode(channel) != "auto" or min(mesh.transfers.sizes(channel)) == 1:
            continue
        link = frozenset((channel.source.stage, channel.target.stage))
        if link not in crossovers:
            measured = _measure(mesh, channel, deadline)
            crossovers[link] = mesh.control.broadcast(measured, channel.source, _read_crossover)
        if channel in mesh.endpoints:
            endpoints[channel] = mesh.endpoints[channel].scattering_from(crossovers[link])
    return endpoints


def _read_crossover(value: Any) -> float:
    return math.inf if value is None else float(value)


def _measure(mesh: Mesh, channel: Channel, deadline: float) -> float | None:
    """The crossover as the sending node measures it. None means infinite, which JSON lacks; also on other ranks."""
    replica = channel.target.replica if channel.source.stage == 0 else channel.source.replica
    there, back = (
        mesh.endpoints.get(mesh.topology.channel(channel.hop, direction, replica)) for direction in ("F", "B")
    )
    if there is None and back is None:
        return None
    leader, scatter = (
        [
            _seconds(
                mesh,
                there and there.scattering_from(least),
                back,
                nbytes,
                deadline,
                f"channel {channel.name}",
            )
            for nbytes in SIZES
        ]
        for least in (math.inf, 0.0)
    )
    bytes_from = crossover(Line.through(*leader), Line.through(*scatter))
    return bytes_from if math.isfinite(bytes_from) else None


def _seconds(
    mesh: Mesh, there: Endpoint | None, back: Endpoint | None, nbytes: int, deadline: float, what: str
) -> float:
    """Of a message there and a byte back: the median; 0 on ranks that did not begin."""
    seconds: list[float] = []
    task = round_trips(there, back, _REPEATS, mesh.device, seconds, nbytes)
    run_tasks([task], mesh.watchdog, deadline, what)
    return statistics.median(seconds) if seconds else 0.0
