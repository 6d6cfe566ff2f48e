"""Computes the peak of a level from its changes over time."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["peak_level"]


def peak_level(changes: Iterable[tuple[float, float]]) -> float:
    """Return the highest running sum of (time, change). At equal times decreases come first."""
    level = peak = 0.0
    for _, change in sorted(changes):
        level += change
        peak = max(peak, level)
    return peak
