"""The time until a deadline."""

from __future__ import annotations

import time
from datetime import timedelta

__all__ = ["time_left"]


def time_left(deadline: float, at_least: float = 0.0) -> timedelta:
    """The time until ``deadline`` (as ``time.monotonic()``), but at least ``at_least`` seconds."""
    return timedelta(seconds=max(at_least, deadline - time.monotonic()))
