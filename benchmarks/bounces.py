"""Counts messages that went through a lane's bounce slots instead of directly into the posted memory."""

from __future__ import annotations

from collections.abc import Sequence

from clock import total

from ldt._C import Lane

__all__ = ["Bounces"]


class Bounces:
    """Counts bounces between each ``start`` and ``stop`` on the ``lanes`` that this rank receives on.

    Members of a stage are not counted, because lanes count messages on leaders.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._received = self._bounced = 0

    def start(self) -> None:
        self._count(-1)

    def stop(self) -> None:
        self._count(1)

    def share(self) -> float | None:
        """Return the share of bounced messages over all ranks. A collective call; None if no lane has received any."""
        received, bounced = total(self._received), total(self._bounced)
        return bounced / received if received else None

    def _count(self, sign: int) -> None:
        for lane in self._lanes:
            stats = lane.stats()
            if stats["received_messages"]:
                self._received += sign * int(stats["received_messages"])
                self._bounced += sign * int(stats.get("bounced", 0))
