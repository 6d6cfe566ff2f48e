"""The stage of each chunk, in model order: walks through all stages in turn, or any other placement."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ldt.errors import TopologyError

__all__ = ["check_parity", "check_placement", "looped"]

_SHOWN = 16  # stages of a placement in an error


def looped(num_stages: int, laps: int) -> tuple[int, ...]:
    """Return the placement of ``laps`` walks through all stages, and of the tail on the edge: chunk c on c % P."""
    return tuple(chunk % num_stages for chunk in range(laps * num_stages + 1))


def check_placement(placement: Any, num_stages: int) -> tuple[int, ...]:
    """Return the stage of each chunk. Raises TopologyError for anything else."""
    example = "for example placement=[0, 1, 1, 0] for two stages"
    if not isinstance(placement, Sequence) or isinstance(placement, (str, bytes)):
        raise TopologyError(f"placement must be a sequence of stages, {example}: got {placement!r}")
    stages = range(num_stages)
    wrong = next((stage for stage in placement if type(stage) is not int or stage not in stages), None)
    absent = min({*stages}.difference(placement), default=None)
    if (
        wrong is not None
        or absent is not None
        or len(placement) < 2
        or placement[0] != 0
        or placement[-1] != 0
    ):
        what = "" if absent is None else f"; there is no chunk on stage {absent}"
        what = what if wrong is None else f"; there is no stage {wrong!r}"
        raise TopologyError(
            "placement must begin and end with stage 0, the edge, have each stage, and have at least two chunks, "
            f"{example}: got {_listed(placement)}{what}"
        )
    return tuple(placement)


def check_parity(placement: Sequence[int]) -> None:
    """Raise TopologyError for a hop between two even or two odd stages of the cloud, for paired lanes."""
    for source, target in pairwise(placement):
        if 0 not in (source, target) and source != target and source % 2 == target % 2:
            raise TopologyError(
                f"paired lanes go between even and odd cloud stages, but placement={_listed(placement)} has a hop from "
                f"stage {source} to {target}: use lanes='dedicated'"
            )


def _listed(placement: Sequence[object]) -> str:
    more = ", ..." if len(placement) > _SHOWN else ""
    return f"[{', '.join(map(repr, placement[:_SHOWN]))}{more}]"
