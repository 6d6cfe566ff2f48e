"""Measures how slow this machine is, so that tests do not fail because other processes use it.

Time limits in tests are those of an idle machine. They are multiplied by a measured factor of at least 1: measured once
for limits that the code under test gets, since all ranks must use the same, and again when a result is late.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

__all__ = ["allowed", "in_time", "paced", "slowness", "slowness_at_start"]

_IDLE_SECONDS = 0.03  # for the reference work on an idle machine
_MAX_SLOWNESS = 10.0  # so that scaled limits stay finite
_VARIABLE = "LDT_TEST_SLOWNESS"


def slowness_at_start() -> float:
    """How many times longer the reference work took than on an idle machine, at the first call in this run.

    Processes started later read it from the environment, so all use the same value.
    """
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = f"{min(_measure(), _MAX_SLOWNESS):.1f}"
    return float(os.environ[_VARIABLE])


def slowness() -> float:
    """The larger of the current slowness and that at the start."""
    return max(slowness_at_start(), _measure())


def paced(seconds: float) -> timedelta:
    """The limit to pass to the code under test for ``seconds`` on an idle machine. Equal on all ranks."""
    return timedelta(seconds=seconds * slowness_at_start())


def allowed(seconds: float) -> float:
    """The time that something may take now if it may take ``seconds`` on an idle machine."""
    return seconds * slowness()


def in_time(took: float, limit: float) -> bool:
    """Whether ``took`` seconds are within a ``limit`` that holds for an idle machine."""
    return took < limit or took < allowed(limit)


def _measure() -> float:
    took = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(10):
            sum(range(200_000))
        took.append(time.perf_counter() - start)
    return max(1.0, max(took) / _IDLE_SECONDS)
