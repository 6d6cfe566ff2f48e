"""The search space of policies: named orders, windows fitted to the round trip, and steps between such points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain as concatenate

from ldt.plan.action import Kind
from ldt.plan.planner.policy import Limits, Policy
from ldt.plan.planner.replica_costs import ReplicaCosts

__all__ = ["ORDERS", "SearchPoint"]

Priorities = tuple[tuple[int, Kind], ...]

_ROUNDING = 1e-9


def _backwards_first(chunks: Sequence[int]) -> Priorities:
    """Backwards before forwards, later chunks first: microbatches leave as early as possible."""
    later = tuple(reversed(chunks))
    return tuple((c, Kind.B) for c in later) + tuple((c, Kind.F) for c in later)


def _forwards_first(chunks: Sequence[int]) -> Priorities:
    """Forwards before backwards, later chunks first: the windows decide."""
    later = tuple(reversed(chunks))
    return tuple((c, Kind.F) for c in later) + tuple((c, Kind.B) for c in later)


def _early_forwards_first(chunks: Sequence[int]) -> Priorities:
    """Forwards first, earlier chunks first: microbatches far from their end start."""
    return tuple((c, Kind.F) for c in chunks) + tuple((c, Kind.B) for c in reversed(chunks))


def _early_backwards_first(chunks: Sequence[int]) -> Priorities:
    """Backwards first, earlier chunks first: microbatches near their end finish."""
    return tuple((c, Kind.B) for c in chunks) + tuple((c, Kind.F) for c in reversed(chunks))


def _later_chunks_first(chunks: Sequence[int]) -> Priorities:
    """Later chunks first, the backward of each before its forward."""
    return tuple(concatenate.from_iterable(((c, Kind.B), (c, Kind.F)) for c in reversed(chunks)))


def _tail_then_forwards_first(chunks: Sequence[int]) -> Priorities:
    """The last chunk's backward and forward, then the other forwards: the cloud stays busy."""
    later = tuple(reversed(chunks))
    last = ((later[0], Kind.B), (later[0], Kind.F))
    return last + tuple((c, Kind.F) for c in later[1:]) + tuple((c, Kind.B) for c in later[1:])


ORDERS: tuple[Callable[[Sequence[int]], Priorities], ...] = (
    _backwards_first,
    _forwards_first,
    _later_chunks_first,
    _early_backwards_first,
    _early_forwards_first,
    _tail_then_forwards_first,
)


@dataclass(frozen=True)
class SearchPoint:
    """A policy as a few numbers. ``strict``: how many of the cloud's last laps are one-forward-one-backward."""

    order: int = 0
    edge_order: int = 0
    strict: int = 1
    scale: float = 1.0  # of the windows that the round trip needs
    last: int = 0  # additional microbatches in the windows of the last lap
    earlier: int = 0  # additional microbatches in the windows of the earlier laps
    open_edge: bool = True  # the edge has no windows and takes any ready action
    weight_early: bool = False  # with a split backward: W before forwards
    steps: tuple[int, ...] = ()  # per chunk, additional microbatches in its window

    def neighbours(self, laps: int, split: bool) -> Iterator[SearchPoint]:
        """The points that differ in one number, the most promising first."""
        for strict in range(laps + 1):
            yield replace(self, strict=strict)
        for order in range(len(ORDERS)):
            yield replace(self, edge_order=order)
            if laps > 1:  # otherwise a cloud node has one chunk
                yield replace(self, order=order)
        yield replace(self, open_edge=not self.open_edge)
        if split:
            yield replace(self, weight_early=not self.weight_early)
        for step in (-1, 1, -2, 2, 4, 8):
            yield replace(self, last=self.last + step)
            if laps > 1:
                yield replace(self, earlier=self.earlier + step)
                yield replace(self, earlier=self.earlier + step, last=self.last + step)
        for factor in (0.75, 1.5, 0.5):
            yield replace(self, scale=self.scale * factor)

    def small_steps(self) -> Iterator[SearchPoint]:
        """The points with one chunk's window changed by one or two."""
        for chunk in reversed(range(len(self.steps))):
            for step in (-1, 1, -2, 2):
                steps = (*self.steps[:chunk], self.steps[chunk] + step, *self.steps[chunk + 1 :])
                yield replace(self, steps=steps)

    def to_policy(self, costs: ReplicaCosts, microbatches: int, limits: Limits) -> Policy:
        priorities = tuple(
            self._split(ORDERS[self.order if stage else self.edge_order](costs.chunks_of(stage)), costs)
            for stage in range(costs.num_stages)
        )
        strict_from = costs.laps - self.strict
        strict = tuple(
            stage != 0 and costs.lap_of(chunk) >= strict_from for chunk, stage in enumerate(costs.placement)
        )
        return Policy(self.windows(costs, microbatches), strict, priorities, limits)

    def windows(self, costs: ReplicaCosts, microbatches: int) -> tuple[int, ...]:
        """One microbatch, plus one for each that follows during its round trip; on the edge, per replica served.

        Later windows are no larger than earlier ones, otherwise strict ones could wait for each other.
        """
        edge = max(costs.forward[chunk] for chunk in costs.chunks_of(0)) * costs.served
        pace = max(edge, *costs.forward, costs.pipe_pace, costs.critical_path * _ROUNDING)
        pace = pace or 1.0  # if nothing takes time
        last_lap, share = costs.laps - 1, costs.shares(microbatches)[0]
        windows: list[int] = []
        for chunk, trip in enumerate(costs.round_trips):
            extra = self.last if costs.lap_of(chunk) >= last_lap else self.earlier
            window = 1 + math.ceil(self.scale * trip / pace - _ROUNDING) + extra + self.steps[chunk]
            windows.append(max(1, min(share, window, *(windows[-1:] if chunk > 1 else ()))))
        for chunk in costs.chunks_of(0):
            windows[chunk] = microbatches if self.open_edge else windows[chunk] * costs.served
        return tuple(windows)

    def _split(self, priorities: Priorities, costs: ReplicaCosts) -> Priorities:
        if costs.weight is None:
            return priorities
        weights = tuple((chunk, Kind.W) for chunk, kind in priorities if kind is Kind.B)
        split = tuple((chunk, Kind.I if kind is Kind.B else kind) for chunk, kind in priorities)
        if not self.weight_early:
            return split + weights
        first = [kind for _, kind in split].index(Kind.F)
        return split[:first] + weights + split[first:]
