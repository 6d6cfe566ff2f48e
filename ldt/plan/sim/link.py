"""The model of time that the engine and the planner's scheduler share: a queue of events, and links."""

from __future__ import annotations

import heapq
from typing import Any

__all__ = ["EventQueue", "Link"]


class EventQueue:
    """Events by time; those of equal times are first come, first served."""

    __slots__ = ("_pushed", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Any, Any]] = []  # time, number, what happens, and to what
        self._pushed = 0

    def push(self, time: float, what: object, subject: object) -> None:
        self._pushed += 1  # the heap never compares what happens
        heapq.heappush(self.heap, (time, self._pushed, what, subject))


class Link:
    """A pipe (``Topology.pipe_of``): it carries one message at a time, in the order in which they become ready.

    A message keeps the link from its turn until its last byte has been sent, and arrives a latency later. Latencies
    overlap.
    """

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0

    def take(self, now: float, occupancy: float) -> float:
        """Take the next turn for ``occupancy`` seconds, until ``free_at``. Returns its start."""
        start = self.free_at if self.free_at > now else now
        self.free_at = start + occupancy
        return start
