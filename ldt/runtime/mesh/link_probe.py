"""Measures latency and bandwidth of each hop by round trips over the lanes that steps use."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from ldt.errors import LdtError
from ldt.runtime.comm.endpoint import Endpoint
from ldt.runtime.comm.preconnect import await_on_host
from ldt.runtime.health.watchdog import Watchdog
from ldt.runtime.mesh.mesh import Mesh
from ldt.topology import Direction

__all__ = ["LinkFigures", "endpoint_of", "probe_links", "round_trip"]

REPEATS = 5
MIN_BYTES = 1 << 20  # a smaller message does not show the bandwidth
_MIN_SECONDS = 1e-9  # where a long message takes no longer than an empty one
_POLL_SECONDS = 1e-5


@dataclass(frozen=True)
class LinkFigures:
    """``latency``: one-way seconds of an empty message. ``bandwidth``: bytes per second beyond it."""

    latency: float
    bandwidth: float


def probe_links(mesh: Mesh, nbytes: dict[int, int]) -> dict[int, LinkFigures]:
    """Return the figures of each hop in ``nbytes``, the bytes of its messages, equal on every rank.

    The slowest replica counts. A collective call of all ranks: probes one hop, and of each hop one replica, at a time.
    """
    figures = {}
    for hop, size in sorted(nbytes.items()):
        answers = []
        for replica in range(mesh.topology.dp):
            local = _probe(mesh, hop, replica, max(size, MIN_BYTES))
            answers += [
                answer for answer in mesh.control.all_gather(local, _read_seconds) if answer is not None
            ]
        empty, long = (max(times) for times in zip(*answers, strict=True))
        figures[hop] = LinkFigures(empty / 2, max(size, MIN_BYTES) / max(long - empty, _MIN_SECONDS))
    return figures


def _probe(mesh: Mesh, hop: int, replica: int, nbytes: int) -> tuple[float, float] | None:
    """Seconds of a round trip with a 1-byte message and with one of ``nbytes``. None unless this rank starts them.

    Medians after one warm-up round. The answer always has one byte.
    """
    there, back = endpoint_of(mesh, hop, "F", replica), endpoint_of(mesh, hop, "B", replica)
    if there is None and back is None:
        return None
    answer = torch.zeros(1, dtype=torch.uint8, device=mesh.device)
    medians = []
    for size in (1, nbytes):
        message = torch.zeros(size, dtype=torch.uint8, device=mesh.device)  # outside the timed part
        times = [round_trip(mesh.watchdog, (there, message), (back, answer)) for _ in range(REPEATS + 1)]
        medians.append(statistics.median(times[1:]))
    return (medians[0], medians[1]) if there is not None and there.sends else None


def _read_seconds(value: Any) -> tuple[float, float] | None:
    """Parse what ``_probe`` returned on one rank."""
    if value is None:
        return None
    empty, long = value
    return float(empty), float(long)


def endpoint_of(mesh: Mesh, hop: int, direction: Direction, replica: int) -> Endpoint | None:
    """This rank's endpoint of a channel; None if it has none, such as a member of a node that sends."""
    return mesh.endpoints.get(mesh.topology.channel(hop, direction, replica))


def round_trip(
    watchdog: Watchdog, *legs: tuple[Endpoint | None, torch.Tensor], deadline: float = math.inf
) -> float:
    """Send or receive each leg's message in turn and return the seconds; legs without an endpoint are skipped.

    Raises LdtError if a message has not arrived by ``deadline`` (``time.monotonic()``).
    """
    start = time.perf_counter()
    for endpoint, message in legs:
        if endpoint is not None:
            work = (endpoint.send if endpoint.sends else endpoint.receive)([message], "probe")
            if work is not None and not await_on_host(work, watchdog, _POLL_SECONDS, deadline):
                raise LdtError(
                    f"measuring channel {endpoint.channel.name} took too long: give connect a longer timeout"
                )
    return time.perf_counter() - start
