"""Search for the rules whose schedule is the shortest: a few named orders, windows fitted to the link, small steps.

Every trial is one play of the step by ``list_scheduler``. The search has a budget of played actions and not of time,
so that it finds the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ldt.plan.planner.list_scheduler import schedule
from ldt.plan.planner.lower_bound import chain_bound
from ldt.plan.planner.policy import Limits, Rules, Schedule
from ldt.plan.planner.replica_costs import Chain
from ldt.plan.planner.search_space import ORDERS, Knobs

__all__ = ["search"]

_BUDGET = 120_000  # actions to be played in a search
_LEAST_TRIALS, _MOST_TRIALS = 6, 300
_PATIENT = 50  # trials from which on other orders are tried for the sake of memory, too
_TINY = 0.01  # a scale of windows that leaves one or two microbatches in each
_TOLERANCE = 1e-9  # relative: makespans that are closer are equal


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
        self.knobs = Knobs(steps=(0,) * chain.num_chunks)
        self.seen: set[Rules] = set()
        self.best = Schedule([], float("inf"))

    def turn_knobs(self) -> None:
        """From each pair of an order and a strictness, the best first, go to better neighbours while there are."""
        laps = self.chain.tail // self.chain.num_stages
        starts = [
            replace(
                self.knobs, order=order, edge_order=order, strict=strict, scale=scale, open_edge=scale == 1
            )
            for scale in self._scales()
            for order in range(len(ORDERS))
            for strict in range(laps, -1, -1)
        ]
        tried = [(self._try(knobs), index) for index, knobs in enumerate(starts) if self._goes_on()]
        for makespan, index in sorted(tried):
            self._descend(starts[index], makespan)

    def _scales(self) -> list[float]:
        """1, and what windows must shrink by to be within every stage's capacity together.

        Without windows the edge would give all its room to forwards of the head, and none to later chunks.
        """
        if self.limits.capacity is None:
            return [1.0]
        scale = 1.0
        while not self._fits(scale) and scale > _TINY:
            scale *= 0.9
        return [scale, 1.0] if scale < 1 else [1.0]

    def _fits(self, scale: float) -> bool:
        knobs = replace(self.knobs, scale=scale, open_edge=False)
        windows, (capacity, weights, _) = knobs.windows(self.chain, self.microbatches), self.limits
        asked = [0.0] * self.chain.num_stages
        for chunk, window in enumerate(windows):
            asked[chunk % self.chain.num_stages] += window * (1.0 if weights is None else weights[chunk])
        return capacity is None or all(a <= have for a, have in zip(asked, capacity, strict=True))

    def _descend(self, knobs: Knobs, makespan: float) -> None:
        better: tuple[float, Knobs] | None = (makespan, knobs)
        while better is not None and self._goes_on():
            makespan, knobs = better
            better = self._best_of(knobs, makespan)

    def _best_of(self, knobs: Knobs, makespan: float) -> tuple[float, Knobs] | None:
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
        others = [replace(self.knobs, edge_order=order) for order in range(len(ORDERS) if patient else 0)]
        before = self.best
        for knobs in (self.knobs, *others):
            if self.trials > 0:
                self._try(knobs, limits)
            if self.best is not before:
                return True
        return False

    def _try(self, knobs: Knobs, limits: Limits | None = None) -> float:
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
