"""Searches for the policy with the shortest schedule: named orders, windows fitted to the link, small steps.

Every trial schedules the step once with ``list_scheduler``. The budget counts scheduled actions, not time, so the
result is the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ldt.plan.planner.list_scheduler import schedule
from ldt.plan.planner.lower_bound import replica_bound
from ldt.plan.planner.policy import Limits, Policy, Schedule
from ldt.plan.planner.replica_costs import ReplicaCosts
from ldt.plan.planner.search_space import ORDERS, SearchPoint

__all__ = ["search"]

_BUDGET = 120_000  # actions to schedule in a search
_LEAST_TRIALS, _MOST_TRIALS = 6, 300
_PATIENT = 50  # with at least so many trials, other orders are tried to save memory, too
_SHORTEST = 10  # schedules to return, besides the best
_TINY = 0.01  # a scale that leaves one or two microbatches in each window
_TOLERANCE = 1e-9  # relative: makespans that are closer are equal


def search(costs: ReplicaCosts, microbatches: int, limits: Limits) -> list[Schedule]:
    """Return the shortest schedules found. The first is the best: among equally short ones, that with least live."""
    search = _Search(costs, microbatches, limits)
    search.explore()
    if limits.capacity is None:
        search.save_memory()
    return [search.best, *search.shortest]


class _Search:
    def __init__(self, costs: ReplicaCosts, microbatches: int, limits: Limits) -> None:
        self.costs, self.microbatches, self.limits = costs, microbatches, limits
        actions = costs.num_chunks * microbatches * (2 if costs.weight is None else 3)
        self.all_trials = max(_LEAST_TRIALS, min(_MOST_TRIALS, _BUDGET // actions))
        self.trials = self.all_trials  # left
        self.goal = replica_bound(costs, microbatches) * (1 + _TOLERANCE)
        self.best_point = SearchPoint(steps=(0,) * costs.num_chunks)
        self.seen: set[Policy] = set()
        self.best = Schedule([], float("inf"))
        self.shortest: list[Schedule] = []

    def explore(self) -> None:
        """Descend from each pair of an order and a strictness, the best first, to better neighbours."""
        laps = self.costs.laps
        starts = [
            replace(
                self.best_point,
                order=order,
                edge_order=order,
                strict=strict,
                scale=scale,
                open_edge=scale == 1,
            )
            for scale in self._scales()
            for order in range(len(ORDERS))
            for strict in range(laps, -1, -1)
        ]
        tried = [(self._try(point), index) for index, point in enumerate(starts) if self._continues()]
        for makespan, index in sorted(tried):
            self._descend(starts[index], makespan)

    def _scales(self) -> list[float]:
        """1, and the scale at which the windows fit every stage's capacity.

        Without windows the edge would give all its capacity to forwards of the head, and none to later chunks.
        """
        if self.limits.capacity is None:
            return [1.0]
        scale = 1.0
        while not self._fits(scale) and scale > _TINY:
            scale *= 0.9
        return [scale, 1.0] if scale < 1 else [1.0]

    def _fits(self, scale: float) -> bool:
        point = replace(self.best_point, scale=scale, open_edge=False)
        windows, (capacity, weights, _) = point.windows(self.costs, self.microbatches), self.limits
        needed = [0.0] * self.costs.num_stages
        for chunk, window in enumerate(windows):
            needed[self.costs.placement[chunk]] += window * (1.0 if weights is None else weights[chunk])
        return capacity is None or all(n <= c for n, c in zip(needed, capacity, strict=True))

    def _descend(self, point: SearchPoint, makespan: float) -> None:
        better: tuple[float, SearchPoint] | None = (makespan, point)
        while better is not None and self._continues():
            makespan, point = better
            better = self._best_of(point, makespan)

    def _best_of(self, point: SearchPoint, makespan: float) -> tuple[float, SearchPoint] | None:
        """The best neighbour, else the best small step, if it beats ``makespan``."""
        laps = self.costs.laps
        for candidates in (point.neighbours(laps, self.costs.weight is not None), point.small_steps()):
            best = (makespan * (1 - _TOLERANCE), point)
            for candidate in candidates:
                if self._continues() and (reached := self._try(candidate)) < best[0]:
                    best = (reached, candidate)
            if best[0] < makespan * (1 - _TOLERANCE):
                return best
        return None

    def _continues(self) -> bool:
        return self.trials > 0 and self.best.makespan > self.goal

    def save_memory(self) -> None:
        """Find the smallest capacity that costs no time, first common to all stages, then for the edge."""
        stages = range(self.costs.num_stages)
        patient = self.all_trials >= _PATIENT
        self.trials = self.all_trials // 2 if patient else 2 * _LEAST_TRIALS
        for capped in (stages, range(1)):
            low, high = len(self.costs.chunks_of(0)), max(self.best.peaks[stage] for stage in capped)
            while low < high and self.trials > 0:
                middle = (low + high) // 2
                peaks = self.best.peaks
                capacity = tuple(float(min(peaks[s], middle) if s in capped else peaks[s]) for s in stages)
                if self._keeps_time(self.limits._replace(capacity=capacity), patient):
                    high = middle
                else:
                    low = middle + 1

    def _keeps_time(self, limits: Limits, patient: bool) -> bool:
        """Whether the best point, possibly with another order on the edge, is as fast within ``limits``."""
        others = [
            replace(self.best_point, edge_order=order) for order in range(len(ORDERS) if patient else 0)
        ]
        before = self.best
        for point in (self.best_point, *others):
            if self.trials > 0:
                self._try(point, limits)
            if self.best is not before:
                return True
        return False

    def _try(self, point: SearchPoint, limits: Limits | None = None) -> float:
        """The makespan of ``point``; infinite if it was tried before."""
        policy = point.to_policy(self.costs, self.microbatches, limits or self.limits)
        if policy in self.seen:
            return float("inf")
        self.seen.add(policy)
        self.trials -= 1
        found = schedule(self.costs, self.microbatches, policy)
        if _better(found, self.best):
            self.best, self.best_point = found, point
        self.shortest = sorted([*self.shortest, found], key=lambda schedule: schedule.makespan)[:_SHORTEST]
        return found.makespan


def _better(new: Schedule, old: Schedule) -> bool:
    if abs(new.makespan - old.makespan) > _TOLERANCE * old.makespan or math.isinf(old.makespan):
        return new.makespan < old.makespan
    return sum(new.peaks) < sum(old.peaks)
