"""Computes the warm-up counts of the fixed U-shaped schedule, clamped to the number of microbatches."""

from __future__ import annotations

from typing import NamedTuple

from ldt.errors import PlanError

__all__ = ["Counts", "check_num_microbatches", "warmup_counts"]


class Counts(NamedTuple):
    """The number of actions that a node runs before its order becomes periodic."""

    first: int  # forwards of the first lap's chunk
    second: int  # forwards of the second lap's chunk; 0 with one lap
    tail: int  # forward and backward pairs of the tail, on the edge


def warmup_counts(num_stages: int, num_microbatches: int, laps: int, stage: int) -> Counts:
    """Return the counts of ``stage``, the same on all ranks. docs/design.md, section 7, gives the formulas."""
    tail = _tail_pairs(num_stages, laps)
    if laps == 1:
        counts = Counts(num_stages + 1 if stage == 0 else num_stages - stage, 0, tail)
    else:
        counts = Counts(num_stages, num_stages - stage, tail)
    return Counts(*(min(count, num_microbatches) for count in counts))


def _tail_pairs(num_stages: int, laps: int) -> int:
    if laps == 1:
        return (4 * num_stages + 5) // 6  # floor((P-1) * 2/3 - 1/2 + 2)
    if laps == 2:
        return (4 * num_stages + 1) // 6
    raise PlanError(f"the fixed schedule has one or two laps, got {laps}")


def check_num_microbatches(number: object) -> None:
    """Raise PlanError unless ``number`` is an int of at least 1."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise PlanError(f"num_microbatches must be an int of at least 1, got {number!r}")
