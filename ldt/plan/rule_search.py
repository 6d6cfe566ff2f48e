"""Search for the rules whose schedule is the shortest: a few named orders, windows fitted to the link, small steps.

Every trial is one play of the step by ``list_scheduler``. The search has a budget of played actions and not of time,
so that it finds the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain as concatenate
from typing import NamedTuple

from ldt.plan.action import Kind
from ldt.plan.bound import chain_bound
from ldt.plan.chain import Chain
from ldt.plan.list_scheduler import Rules, Schedule, schedule

__all__ = ["Limits", "search"]

_BUDGET = 120_000  # actions to be played in a search
_LEAST_TRIALS, _MOST_TRIALS = 6, 300
_PATIENT = 50  # trials from which on other orders are tried for the sake of memory, too
_TOLERANCE = 1e-9  # relative: makespans that are closer are equal

Priorities = tuple[tuple[int, Kind], ...]


class Limits(NamedTuple):
    """What all rules of a search have in common; see Rules."""

    capacity: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    buffers: int | None = None


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


_ORDERS: tuple[Callable[[Sequence[int]], Priorities], ...] = (
    _backwards_first,
    _forwards_first,
    _later_chunks_first,
    _early_backwards_first,
    _early_forwards_first,
    _tail_then_forwards_first,
)


@dataclass(frozen=True)
class _Knobs:
    """Rules in few numbers. ``strict``: the last so many laps of the cloud are one-forward-one-backward."""

    order: int = 0
    edge_order: int = 0
    strict: int = 1
    scale: float = 1.0  # of the windows that the round trip asks for
    last: int = 0  # microbatches more in the windows of the last lap
    earlier: int = 0  # and of the laps before
    weight_early: bool = False  # with a split backward: W before forwards
    steps: tuple[int, ...] = ()  # per chunk, microbatches more in its window

    def neighbours(self, laps: int, split: bool) -> Iterator[_Knobs]:
        """These knobs with one of them turned, the most promising first."""
        for strict in range(laps + 1):
            yield replace(self, strict=strict)
        for order in range(len(_ORDERS)):
            yield replace(self, edge_order=order)
            if laps > 1:  # else a node of the cloud has one chunk
                yield replace(self, order=order)
        if split:
            yield replace(self, weight_early=not self.weight_early)
        for step in (-1, 1, -2, 2, 4, 8):
            yield replace(self, last=self.last + step)
            if laps > 1:
                yield replace(self, earlier=self.earlier + step)
                yield replace(self, earlier=self.earlier + step, last=self.last + step)
        for factor in (0.75, 1.5, 0.5):
            yield replace(self, scale=self.scale * factor)

    def small_steps(self) -> Iterator[_Knobs]:
        """One chunk's window changed by one or two."""
        for chunk in reversed(range(len(self.steps))):
            for step in (-1, 1, -2, 2):
                steps = (*self.steps[:chunk], self.steps[chunk] + step, *self.steps[chunk + 1 :])
                yield replace(self, steps=steps)

    def rules(self, chain: Chain, microbatches: int, limits: Limits) -> Rules:
        priorities = tuple(
            self._split(_ORDERS[self.order if stage else self.edge_order](chain.chunks_of(stage)), chain)
            for stage in range(chain.num_stages)
        )
        strict_from = chain.tail - self.strict * chain.num_stages
        strict = tuple(c >= strict_from and c % chain.num_stages != 0 for c in range(chain.num_chunks))
        return Rules(self._windows(chain, microbatches), strict, priorities, *limits)

    def _windows(self, chain: Chain, microbatches: int) -> tuple[int, ...]:
        """One for now, and one for each that comes while its round trip lasts.

        Later windows are no larger than earlier ones, or strict ones could wait for each other. The edge's
        windows are open: it takes what is ready.
        """
        pace = max(*chain.forward, *chain.occupancy, chain.critical_path * _TOLERANCE)
        last_lap = chain.tail - chain.num_stages
        windows: list[int] = []
        for chunk, trip in enumerate(chain.round_trips):
            more = self.last if chunk >= last_lap else self.earlier
            window = 1 + math.ceil(self.scale * trip / pace - _TOLERANCE) + more + self.steps[chunk]
            windows.append(max(1, min(microbatches, window, *(windows[-1:] if chunk > 1 else ()))))
        for chunk in range(0, chain.num_chunks, chain.num_stages):
            windows[chunk] = microbatches
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


def search(chain: Chain, microbatches: int, limits: Limits) -> Schedule:
    """The best schedule found: the shortest, and of the shortest the one with the fewest live activations."""
    search = _Search(chain, microbatches, limits)
    search.turn_knobs()
    if limits.capacity is None:
        search.save_memory()
    return search.best


class _Search:
    def __init__(self, chain: Chain, microbatches: int, limits: Limits) -> None:
        self.chain, self.microbatches, self.limits = chain, microbatches, limits
        actions = chain.num_chunks * microbatches * (2 if chain.weight is None else 3)
        self.all_trials = max(_LEAST_TRIALS, min(_MOST_TRIALS, _BUDGET // actions))
        self.trials = self.all_trials  # left
        self.goal = chain_bound(chain, microbatches) * (1 + _TOLERANCE)
        self.knobs = _Knobs(steps=(0,) * chain.num_chunks)
        self.seen: set[Rules] = set()
        self.best = Schedule([], float("inf"))

    def turn_knobs(self) -> None:
        """From each pair of an order and a strictness, the best first, go to better neighbours while there are."""
        laps = self.chain.tail // self.chain.num_stages
        starts = [
            replace(self.knobs, order=order, edge_order=order, strict=strict)
            for order in range(len(_ORDERS))
            for strict in range(laps, -1, -1)
        ]
        tried = [(self._try(knobs), index) for index, knobs in enumerate(starts) if self._goes_on()]
        for makespan, index in sorted(tried):
            self._descend(starts[index], makespan)

    def _descend(self, knobs: _Knobs, makespan: float) -> None:
        better: tuple[float, _Knobs] | None = (makespan, knobs)
        while better is not None and self._goes_on():
            makespan, knobs = better
            better = self._best_of(knobs, makespan)

    def _best_of(self, knobs: _Knobs, makespan: float) -> tuple[float, _Knobs] | None:
        """The best neighbour, or else the best small step, if it is better than ``makespan``."""
        laps = self.chain.tail // self.chain.num_stages
        for candidates in (knobs.neighbours(laps, self.chain.weight is not None), knobs.small_steps()):
            best = (makespan * (1 - _TOLERANCE), knobs)
            for candidate in candidates:
                if self._goes_on() and (reached := self._try(candidate)) < best[0]:
                    best = (reached, candidate)
            if best[0] < makespan * (1 - _TOLERANCE):
                return best
        return None

    def _goes_on(self) -> bool:
        return self.trials > 0 and self.best.makespan > self.goal

    def save_memory(self) -> None:
        """The least capacity, the same for all stages and then for the edge, that costs no time."""
        stages = range(self.chain.num_stages)
        patient = self.all_trials >= _PATIENT
        self.trials = self.all_trials // 2 if patient else 2 * _LEAST_TRIALS
        for capped in (stages, range(1)):
            low, high = len(self.chain.chunks_of(0)), max(self.best.peaks[stage] for stage in capped)
            while low < high and self.trials > 0:
                middle = (low + high) // 2
                peaks = self.best.peaks
                capacity = tuple(float(min(peaks[s], middle) if s in capped else peaks[s]) for s in stages)
                if self._keeps_time(self.limits._replace(capacity=capacity), patient):
                    high = middle
                else:
                    low = middle + 1

    def _keeps_time(self, limits: Limits, patient: bool) -> bool:
        """Whether the best knobs, or them with another order on the edge, are as fast within ``limits``."""
        others = [replace(self.knobs, edge_order=order) for order in range(len(_ORDERS) if patient else 0)]
        before = self.best
        for knobs in (self.knobs, *others):
            if self.trials > 0:
                self._try(knobs, limits)
            if self.best is not before:
                return True
        return False

    def _try(self, knobs: _Knobs, limits: Limits | None = None) -> float:
        """The makespan of ``knobs``; infinite if they were tried before."""
        rules = knobs.rules(self.chain, self.microbatches, limits or self.limits)
        if rules in self.seen:
            return float("inf")
        self.seen.add(rules)
        self.trials -= 1
        found = schedule(self.chain, self.microbatches, rules)
        if _better(found, self.best):
            self.best, self.knobs = found, knobs
        return found.makespan


def _better(new: Schedule, old: Schedule) -> bool:
    if abs(new.makespan - old.makespan) > _TOLERANCE * old.makespan or math.isinf(old.makespan):
        return new.makespan < old.makespan
    return sum(new.peaks) < sum(old.peaks)
