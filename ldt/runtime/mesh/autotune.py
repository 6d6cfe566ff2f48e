"""From which size on it pays to cut a message in shares: measured on each link when a mesh with "auto" is connected."""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

import torch

from ldt.runtime.comm.endpoint import Endpoint
from ldt.runtime.mesh.link_probe import end_of, there_and_back
from ldt.runtime.mesh.mesh import Mesh
from ldt.topology import Channel

__all__ = ["SIZES", "Line", "calibrate", "crossover"]

SIZES = (64 << 10, 4 << 20)
_REPEATS = 3
_GAIN = 1.1  # so much faster per byte, or the difference is noise


class Line(NamedTuple):
    """Seconds for a message of n bytes: ``start + n * per_byte``."""

    start: float
    per_byte: float

    @classmethod
    def through(cls, small: float, large: float) -> Line:
        """The line through the seconds of both sizes that are measured."""
        per_byte = max(0.0, large - small) / (SIZES[1] - SIZES[0])
        return cls(small - per_byte * SIZES[0], per_byte)


def crossover(leader: Line, scatter: Line) -> float:
    """The bytes from which on ``scatter`` is the faster one; infinite if it gains less than a tenth per byte."""
    if scatter.per_byte * _GAIN > leader.per_byte or leader.per_byte == 0.0:
        return math.inf
    return max(0.0, (scatter.start - leader.start) / (leader.per_byte - scatter.per_byte))


def calibrate(mesh: Mesh, deadline: float) -> dict[Channel, Endpoint]:
    """This rank's ends of the channels that are "auto", set to what was measured. A collective call of all ranks.

    Links are measured one after the other, each between two stages once, with 16 messages of up to 4 MiB there and one
    byte back each time; what is found stands for the way back and for all replicas. Raises LdtError if that was not
    done by ``deadline`` (``time.monotonic()``), RemoteStageError if another rank failed.
    """
    found: dict[frozenset[int], float] = {}
    ends = {}
    for channel in mesh.topology.channels:
        if mesh.transfers.mode(channel) != "auto" or min(mesh.transfers.sizes(channel)) == 1:
            continue
        link = frozenset((channel.source.stage, channel.target.stage))
        if link not in found:
            mine = _measure(mesh, channel, deadline)
            found[link] = mesh.control.broadcast(mine, channel.source, _read_crossover)
        if channel in mesh.endpoints:
            ends[channel] = mesh.endpoints[channel].scattering_from(found[link])
    return ends


def _read_crossover(value: Any) -> float:
    return math.inf if value is None else float(value)


def _measure(mesh: Mesh, channel: Channel, deadline: float) -> float | None:
    """The crossover, as the sending node sees it; None for infinite (JSON has none) and on the other ranks."""
    replica = channel.target.replica if channel.source.stage == 0 else channel.source.replica
    there, back = (end_of(mesh, channel.hop, direction, replica) for direction in ("F", "B"))
    if there is None and back is None:
        return None
    leader, scatter = (
        [_seconds(mesh, there and there.scattering_from(least), back, nbytes, deadline) for nbytes in SIZES]
        for least in (math.inf, 0.0)
    )
    bytes_from = crossover(Line.through(*leader), Line.through(*scatter))
    return bytes_from if math.isfinite(bytes_from) else None


def _seconds(
    mesh: Mesh, there: Endpoint | None, back: Endpoint | None, nbytes: int, deadline: float
) -> float:
    message = torch.zeros(nbytes, dtype=torch.uint8, device=mesh.device)
    answer = torch.zeros(1, dtype=torch.uint8, device=mesh.device)
    ways = (there, message), (back, answer)
    rounds = [there_and_back(mesh.watchdog, *ways, deadline=deadline) for _ in range(_REPEATS + 1)]
    return statistics.median(rounds[1:])
