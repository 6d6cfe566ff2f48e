"""Rules in few numbers: named orders, windows fitted to the link's round trip, and the steps between such rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain as concatenate

from ldt.plan.action import Kind
from ldt.plan.planner.policy import Limits, Rules
from ldt.plan.planner.replica_costs import Chain

__all__ = ["ORDERS", "Knobs"]

Priorities = tuple[tuple[int, Kind], ...]

_ROUNDING = 1e-9


def _backwards_first(chunks: Sequence[int]) -> Priorities:
    """Backwards before forwards, of each the later chunks first: microbatches leave as soon as they can."""
    later = tuple(reversed(chunks))
    return tuple((c, Kind.B) for c in later) + tuple((c, Kind.F) for c in later)


def _forwards_first(chunks: Sequence[int]) -> Priorities:
    """Forwards before backwards, of each the later chunks first: the windows decide."""
    later = tuple(reversed(chunks))
    return tuple((c, Kind.F) for c in later) + tuple((c, Kind.B) for c in later)


def _early_forwards_first(chunks: Sequence[int]) -> Priorities:
    """Forwards first, and of them the earlier chunks: what is far from its end starts."""
    return tuple((c, Kind.F) for c in chunks) + tuple((c, Kind.B) for c in reversed(chunks))


def _early_backwards_first(chunks: Sequence[int]) -> Priorities:
    """Backwards first, and of them the earlier chunks: microbatches that are nearly done end."""
    return tuple((c, Kind.B) for c in chunks) + tuple((c, Kind.F) for c in reversed(chunks))


def _later_chunks_first(chunks: Sequence[int]) -> Priorities:
    """Chunk by chunk, the later first, its backward before its forward."""
    return tuple(concatenate.from_iterable(((c, Kind.B), (c, Kind.F)) for c in reversed(chunks)))


def _tail_then_forwards_first(chunks: Sequence[int]) -> Priorities:
    """The last chunk's backward and forward, then the other forwards: the cloud is fed."""
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
class Knobs:
    """Rules in few numbers. ``strict``: the last so many laps of the cloud are one-forward-one-backward."""

    order: int = 0
    edge_order: int = 0
    strict: int = 1
    scale: float = 1.0  # of the windows that the round trip asks for
    last: int = 0  # microbatches more in the windows of the last lap
    earlier: int = 0  # and of the laps before
    open_edge: bool = True  # the edge has no windows: it takes what is ready
    weight_early: bool = False  # with a split backward: W before forwards
    steps: tuple[int, ...] = ()  # per chunk, microbatches more in its window

    def neighbours(self, laps: int, split: bool) -> Iterator[Knobs]:
        """These knobs with one of them turned, the most promising first."""
        for strict in range(laps + 1):
            yield replace(self, strict=strict)
        for order in range(len(ORDERS)):
            yield replace(self, edge_order=order)
            if laps > 1:  # else a node of the cloud has one chunk
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

    def small_steps(self) -> Iterator[Knobs]:
        """One chunk's window changed by one or two."""
        for chunk in reversed(range(len(self.steps))):
            for step in (-1, 1, -2, 2):
                steps = (*self.steps[:chunk], self.steps[chunk] + step, *self.steps[chunk + 1 :])
                yield replace(self, steps=steps)

    def rules(self, chain: Chain, microbatches: int, limits: Limits) -> Rules:
        priorities = tuple(
            self._split(ORDERS[self.order if stage else self.edge_order](chain.chunks_of(stage)), chain)
            for stage in range(chain.num_stages)
        )
        strict_from = chain.tail - self.strict * chain.num_stages
        strict = tuple(c >= strict_from and c % chain.num_stages != 0 for c in range(chain.num_chunks))
        return Rules(self.windows(chain, microbatches), strict, priorities, limits)

    def windows(self, chain: Chain, microbatches: int) -> tuple[int, ...]:
        """One for now, and one for each that comes while its round trip lasts; on the edge, of each replica served.

        Later windows are no larger than earlier ones, or strict ones could wait for each other.
        """
        edge = max(chain.forward[chunk] for chunk in chain.chunks_of(0)) * chain.served
        pace = max(edge, *chain.forward, *chain.occupancy, chain.critical_path * _ROUNDING)
        pace = pace or 1.0  # if nothing takes time
        last_lap, share = chain.tail - chain.num_stages, chain.shares(microbatches)[0]
        windows: list[int] = []
        for chunk, trip in enumerate(chain.round_trips):
            more = self.last if chunk >= last_lap else self.earlier
            window = 1 + math.ceil(self.scale * trip / pace - _ROUNDING) + more + self.steps[chunk]
            windows.append(max(1, min(share, window, *(windows[-1:] if chunk > 1 else ()))))
        for chunk in chain.chunks_of(0):
            windows[chunk] = microbatches if self.open_edge else windows[chunk] * chain.served
        return tuple(windows)

    def _split(self, priorities: Priorities, chain: Chain) -> Priorities:
        if chain.weight is None:
            return priorities
        weights = tuple((chunk, Kind.W) for chunk, kind in priorities if kind is Kind.B)
        apart = tuple((chunk, Kind.I if kind is Kind.B else kind) for chunk, kind in priorities)
        if not self.weight_early:
            return apart + weights
        first = [kind for _, kind in apart].index(Kind.F)
        return apart[:first] + weights + apart[first:]
