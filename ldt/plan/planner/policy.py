"""What a schedule is made by, and what it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ldt.plan.action import Kind

__all__ = ["Limits", "Rules", "Schedule", "Taken"]


class Taken(NamedTuple):
    """An action and when it ended; ``microbatch`` counts the node's own from 0."""

    end: float
    chunk: int
    kind: Kind
    microbatch: int


class Limits(NamedTuple):
    """What does not depend on the order that is tried.

    ``capacity``: per stage, how much its live activations may weigh together (None: any), with ``weights`` per
    chunk (None: 1 each). ``buffers``: how many messages of a channel may be received ahead of their use (None:
    any).
    """

    capacity: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    buffers: int | None = None


_NO_LIMITS = Limits()


@dataclass(frozen=True)
class Rules:
    """What a node may take and what it prefers.

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
    """What was taken and the time at which all was done; infinite if the rules led nowhere.

    ``taken`` is that of the edge, then of the cloud's stages for each replica that the edge serves: see ``row``.
    """

    taken: list[list[Taken]]
    makespan: float
    peaks: list[int] = field(default_factory=list)  # per stage: activations live at once, at most

    def row(self, stage: int, turn: int) -> list[Taken]:
        """What the node of ``stage`` took that belongs to the replica which the edge serves in that turn."""
        return self.taken[stage + turn * (len(self.peaks) - 1)]
