"""How long a message takes on each hop: messages that go there and back, over the lanes that steps use."""

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

__all__ = ["LinkFigures", "end_of", "probe_links", "there_and_back"]

REPEATS = 5
LEAST_BYTES = 1 << 20  # a smaller message does not tell the bandwidth
_LEAST_SECONDS = 1e-9  # where a long message took no longer than an empty one
_POLL_SECONDS = 1e-5


@dataclass(frozen=True)
class LinkFigures:
    """One-way seconds of an empty message, and bytes per second that a long one adds to them."""

    latency: float
    bandwidth: float


def probe_links(mesh: Mesh, nbytes: dict[int, int]) -> dict[int, LinkFigures]:
    """The figures of each hop in ``nbytes``, whose messages have so many bytes. The slowest replica's, on every rank.

    A collective call of all ranks; hops are probed one after the other, and of each one replica after the other.
    """
    figures = {}
    for hop, size in sorted(nbytes.items()):
        answers = []
        for replica in range(mesh.topology.dp):
            mine = _probe(mesh, hop, replica, max(size, LEAST_BYTES))
            answers += [
                answer for answer in mesh.control.all_gather(mine, _read_seconds) if answer is not None
            ]
        empty, long = (max(times) for times in zip(*answers, strict=True))
        figures[hop] = LinkFigures(empty / 2, max(size, LEAST_BYTES) / max(long - empty, _LEAST_SECONDS))
    return figures


def _probe(mesh: Mesh, hop: int, replica: int, nbytes: int) -> tuple[float, float] | None:
    """Seconds there and back of an empty message and of one of ``nbytes``; None on ranks that do not start them.

    Medians, after one round that is not counted. The answer is always a short one.
    """
    there, back = end_of(mesh, hop, "F", replica), end_of(mesh, hop, "B", replica)
    if there is None and back is None:
        return None
    answer = torch.zeros(1, dtype=torch.uint8, device=mesh.device)
    medians = []
    for size in (1, nbytes):
        message = torch.zeros(size, dtype=torch.uint8, device=mesh.device)  # not in the time
        times = [there_and_back(mesh.watchdog, (there, message), (back, answer)) for _ in range(REPEATS + 1)]
        medians.append(statistics.median(times[1:]))
    return (medians[0], medians[1]) if there is not None and there.sends else None


def _read_seconds(value: Any) -> tuple[float, float] | None:
    """Of one rank: what ``_probe`` gives."""
    if value is None:
        return None
    empty, long = value
    return float(empty), float(long)


def end_of(mesh: Mesh, hop: int, direction: Direction, replica: int) -> Endpoint | None:
    """This rank's end of a channel. A member has none of a channel on which its node sends."""
    return mesh.endpoints.get(mesh.topology.channel(hop, direction, replica))


def there_and_back(
    watchdog: Watchdog, *ways: tuple[Endpoint | None, torch.Tensor], deadline: float = math.inf
) -> float:
    """Seconds for a message there and one back, as far as this rank takes part.

    Raises LdtError if they were not through by ``deadline`` (``time.monotonic()``).
    """
    start = time.perf_counter()
    for end, message in ways:
        if end is not None:
            work = (end.send if end.sends else end.receive)([message], "probe")
            if work is not None and not await_on_host(work, watchdog, _POLL_SECONDS, deadline):
                raise LdtError(
                    f"measuring channel {end.channel.name} took too long: give connect a longer timeout"
                )
    return time.perf_counter() - start
