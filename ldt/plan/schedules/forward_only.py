"""Generates the forward-only schedule for evaluation: any placement, live activations bounded by the stages."""

from __future__ import annotations

from collections.abc import Sequence

from ldt.plan.action import Action, Kind
from ldt.topology import Topology

__all__ = ["forward_only_row"]


def forward_only_row(topology: Topology, num_microbatches: int, stage: int) -> list[Action]:
    """Return the row of ``stage``: in turn t its chunk c runs microbatch t - lag(c), later chunks first.

    A dependency goes to a higher stage in the same turn or to a later turn, so (turn, stage) orders all actions
    and no deadlock is possible.
    """
    chunks = topology.chunks_of(stage)
    lags = _lags(topology.placement)
    row = []
    for turn in range(num_microbatches + lags[chunks[-1]]):
        for chunk in reversed(chunks):
            if 0 <= turn - lags[chunk] < num_microbatches:
                row.append(Action(chunk, Kind.F, turn - lags[chunk]))
    return row


def _lags(placement: Sequence[int]) -> list[int]:
    """Per chunk, how many turns it is behind the first.

    The chunks of a lap, along which stages rise, have one lag. The next lap trails it by the time of a lap in the
    steady state: a lap over n stages takes n forwards, and a stage runs k of them per turn if it has k chunks so far.
    The lags bound the number of microbatches in flight, however many there are.
    """
    lags: list[int] = []
    lag = lap = 0  # lap: the first chunk of it
    for chunk, stage in enumerate(placement):
        if chunk and stage <= placement[chunk - 1]:
            most = max(map(placement[:chunk].count, placement[lap:chunk]))
            lag, lap = lag + -(-(chunk - lap) // most), chunk
        lags.append(lag)
    return lags
