"""The forward-only order, for evaluation: any number of laps, live activations bounded by the stages."""

from __future__ import annotations

from ldt.plan.action import Action, Kind
from ldt.topology import Topology

__all__ = ["forward_only_row"]


def forward_only_row(topology: Topology, num_microbatches: int, stage: int) -> list[Action]:
    """The row of ``stage``: in turn t its chunk of lap l works on microbatch t - lag(l), later laps first.

    A dependency crosses stages upwards within a turn or goes to a later turn, so (turn, stage) orders all
    actions and nothing can wait for itself. The lags are what a microbatch needs to come round in the steady
    state: a walk through P stages takes P forwards, and a stage does l of them per turn once l laps are under
    way. They bound how many microbatches are under way, whatever their number.
    """
    chunks = topology.chunks_of(stage)
    lags = [0]
    for under_way in range(1, topology.laps + 1):
        lags.append(lags[-1] + -(-topology.num_stages // under_way))
    row = []
    for turn in range(num_microbatches + lags[len(chunks) - 1]):
        for chunk, lag in reversed(list(zip(chunks, lags, strict=False))):  # the last lag is the tail's
            if 0 <= turn - lag < num_microbatches:
                row.append(Action(chunk, Kind.F, turn - lag))
    return row
