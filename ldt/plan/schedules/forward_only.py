"""Generates the forward-only schedule for evaluation: any number of laps, live activations bounded by the stages."""

from __future__ import annotations

from ldt.plan.action import Action, Kind
from ldt.topology import Topology

__all__ = ["forward_only_row"]


def forward_only_row(topology: Topology, num_microbatches: int, stage: int) -> list[Action]:
    """Return the row of ``stage``: in turn t its chunk of lap l runs microbatch t - lag(l), later laps first.

    A dependency goes to a higher stage in the same turn or to a later turn, so (turn, stage) orders all actions
    and no deadlock is possible. A lag is the time of one lap in the steady state: a lap of P stages takes P
    forwards, and a stage runs l of them per turn while l laps are active. The lags bound the number of microbatches
    in flight, however many there are.
    """
    chunks = topology.chunks_of(stage)
    lags = [0]
    for active_laps in range(1, topology.laps + 1):
        lags.append(lags[-1] + -(-topology.num_stages // active_laps))
    row = []
    for turn in range(num_microbatches + lags[len(chunks) - 1]):
        for chunk, lag in reversed(list(zip(chunks, lags, strict=False))):  # the last lag is the tail's
            if 0 <= turn - lag < num_microbatches:
                row.append(Action(chunk, Kind.F, turn - lag))
    return row
