"""How much of something there is at most, from when it comes and goes."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["highest_level"]


def highest_level(changes: Iterable[tuple[float, float]]) -> float:
    """The highest sum of (moment, change); at one moment, what goes goes before what comes."""
    level = highest = 0.0
    for _, change in sorted(changes):
        level += change
        highest = max(highest, level)
    return highest
