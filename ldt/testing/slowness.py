"""How slow this machine is, so that a test fails for what is wrong and not for what else computes.

Limits in tests are those of an idle machine. They are multiplied by a factor of at least 1 that is measured: once for
limits that are given to the code under test, as all ranks must give the same, and again when a result comes late.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

__all__ = ["allowed", "in_time", "paced", "slowness", "slowness_at_start"]

_IDLE_SECONDS = 0.03  # that the known piece of work takes where nothing else computes
_MOST = 10.0  # what is paced must end some time
_VARIABLE = "LDT_TEST_SLOWNESS"


def slowness_at_start() -> float:
    """How many times longer a known piece of work took than on an idle machine, when first asked for in this run.

    Processes that are started later take it from the environment, so that it is equal in all of them.
    """
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = f"{min(_measure(), _MOST):.1f}"
    return float(os.environ[_VARIABLE])


def slowness() -> float:
    """The same as it is now, or as it was at the start, if that is more."""
    return max(slowness_at_start(), _measure())


def paced(seconds: float) -> timedelta:
    """A limit to give to the code under test: ``seconds`` of an idle machine. Equal on all ranks."""
    return timedelta(seconds=seconds * slowness_at_start())


def allowed(seconds: float) -> float:
    """What may take ``seconds`` on an idle machine may take this long here and now."""
    return seconds * slowness()


def in_time(took: float, limit: float) -> bool:
    """Whether what took ``took`` seconds has kept a limit that holds for an idle machine."""
    return took < limit or took < allowed(limit)


def _measure() -> float:
    took = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(10):
            sum(range(200_000))
        took.append(time.perf_counter() - start)
    return max(1.0, max(took) / _IDLE_SECONDS)
