"""Scheduling policies and the schedules that they lead to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ldt.plan.action import Kind

__all__ = ["Limits", "Policy", "Schedule", "Scheduled"]


class Scheduled(NamedTuple):
    """An action and its end time. ``microbatch`` counts the node's own microbatches from 0."""

    end: float
    chunk: int
    kind: Kind
    microbatch: int


class Limits(NamedTuple):
    """Limits that hold for every policy.

    ``capacity``: per stage, the total weight of its live activations (None: any), with ``weights`` per chunk
    (None: 1 each). ``buffers``: how many messages of a channel may be received ahead of their use (None: any).
    """

    capacity: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    buffers: int | None = None


_NO_LIMITS = Limits()


@dataclass(frozen=True)
class Policy:
    """Which actions a node may take and which it prefers.

    ``windows``: per chunk, how many of its microbatches may be live on a node. ``strict``: per chunk, whether a
    backward must wait until the window is full (or no forward is left or allowed), which is one-forward-one-backward.
    ``priorities``: per stage, its chunks' (chunk, kind) pairs, the most urgent first.
    """

    windows: tuple[int, ...]
    strict: tuple[bool, ...]
    priorities: tuple[tuple[tuple[int, Kind], ...], ...]
    limits: Limits = _NO_LIMITS


@dataclass
class Schedule:
    """The scheduled actions and the makespan, which is infinite if the policy led to a deadlock.

    ``rows`` has the edge's row, then those of the cloud stages for each replica that the edge serves: see ``row``.
    """

    rows: list[list[Scheduled]]
    makespan: float
    peaks: list[int] = field(default_factory=list)  # per stage: activations live at once, at most

    def row(self, stage: int, turn: int) -> list[Scheduled]:
        """The row of ``stage`` for the replica that the edge serves in that turn."""
        return self.rows[stage + turn * (len(self.peaks) - 1)]
