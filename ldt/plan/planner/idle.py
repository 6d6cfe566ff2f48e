"""How long machines must idle at the start of a step, because a pipe cannot bring all kinds of work at once."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ldt.plan.planner.chain import Counts, Step

__all__ = ["idle_times"]

_ROUNDING = 1e-12  # as a share of the chain
_MOST_MOMENTS = 256  # to look at, per machine


class _Work(NamedTuple):
    """All runs of a step. Each needs ``need`` seconds of the pipe, at least ``lag`` before its start."""

    duration: float
    starts: Sequence[float]
    need: float
    lag: float


def idle_times(
    chain: Sequence[Step], starts: Sequence[Sequence[float]], counts: Counts, latest: float
) -> dict[object, float]:
    """Per machine, seconds that its copies idle together until some moment, which is at most ``latest``.

    Those are t times the number of copies, less the most work that can have been started before t. A step can have been
    started as often as ``starts`` allow. And for each of its runs, the messages between the previous step on this
    machine and it have passed the pipe: all of them together need no more than t less the first message's start and
    the least lag. Which runs give the most work is a fractional knapsack: those with most work per second of pipe.
    """
    by_machine: dict[object, list[int]] = defaultdict(list)
    for index, step in enumerate(chain):
        if step.duration:
            by_machine[step.machine].append(index)
    pipes = [steps for steps in by_machine.values() if chain[steps[0]].level == 0]
    found: dict[object, float] = {}
    for machine, runs in by_machine.items():
        for pipe in pipes:
            if pipe is not runs and pipe[0] < runs[-1]:
                works = _works(chain, starts, runs, pipe)
                copies = counts[chain[runs[0]].level]
                first = chain[pipe[0]].start
                rounding = chain[-1].end * _ROUNDING
                moments = sorted({s - rounding for work in works for s in work.starts if s <= latest})
                for moment in moments[:: math.ceil(len(moments) / _MOST_MOMENTS) or 1]:
                    idle = copies * moment - _most_work(works, moment, first)
                    found[machine] = max(found.get(machine, 0.0), idle)
    return found


def _works(
    chain: Sequence[Step], starts: Sequence[Sequence[float]], runs: Sequence[int], pipe: Sequence[int]
) -> list[_Work]:
    """The steps ``runs`` of a machine with their needs of a pipe, those with most work per need first."""
    works = []
    for previous, run in zip((-1, *runs), runs, strict=False):
        messages = [index for index in pipe if previous < index < run]
        need = sum(chain[index].duration for index in messages)
        lag = chain[run].start - chain[messages[-1]].end if messages else math.inf
        works.append(_Work(chain[run].duration, starts[run], need, lag))
    return sorted(works, key=lambda work: work.need / work.duration)


def _most_work(works: Sequence[_Work], moment: float, first: float) -> float:
    """The most work of which all can have been started before ``moment``; ``first`` is the pipe's first start."""
    lag = min((work.lag for work in works if work.starts[0] < moment), default=math.inf)
    room = max(0.0, moment - first - lag)
    needs = {work.need for work in works if work.need}
    if len(needs) == 1:  # whole messages, the last of which is over before
        need = needs.pop()
        messages = min(room / need, len(works) * len(works[0].starts) + 1.0)
        room = max(0, math.ceil(messages) - 1) * need
    most = 0.0
    for work in works:
        count: float = bisect_left(work.starts, moment)
        if work.need:
            count = min(count, room / work.need)
            room -= count * work.need
        most += count * work.duration
    return most
