"""Draws the fault of a seed for a job of two sites: outages of the link between them, and resets of a connection."""

from __future__ import annotations

import random

from faults.fault import SAVE_EVERY, STEPS, Fault, LinkFaultKind, Point, counts_of
from ldt.topology import Topology

__all__ = ["LINK_KINDS", "LINK_SHAPES", "draw_link"]

# Kinds in turn, with the seconds for which the link is down and those of connect(outage=).
LINK_KINDS: tuple[tuple[LinkFaultKind, float, float], ...] = (
    ("outage", 5.0, 5.0),
    ("reset", 0.0, 5.0),
    ("long_outage", 20.0, 1.0),
    ("outage", 20.0, 20.0),
    ("reset", 0.0, 0.0),
    ("long_outage", 60.0, 2.0),
    ("outage", 60.0, 60.0),
)
LINK_SHAPES = (  # rank 0 is the edge, all others are on the other side of the link
    Topology([1, 1, 1]),
    Topology([1, 2]),
    Topology([1, 1], dp=2, edge_dp=1),
)
_POINTS: tuple[Point, ...] = (
    "action",
    "action",
    "action",
    "optimizer",
    "data",
    "save",
    "save",
    "connect",
    "close",
)


def draw_link(seed: int) -> Fault:
    """Draw the fault of a seed. Consecutive seeds take the kinds in turn."""
    dice = random.Random(seed)
    kind, seconds, outage = LINK_KINDS[seed % len(LINK_KINDS)]
    topology = dice.choice(LINK_SHAPES)
    rank = dice.randrange(topology.world_size)
    point = dice.choice(_POINTS)
    steps = range(SAVE_EVERY - 1, STEPS - 1, SAVE_EVERY) if point == "save" else range(1, STEPS - 1)
    return Fault(
        seed,
        kind,
        topology,
        rank,
        step={"connect": -1, "close": STEPS - 1}.get(point, dice.choice(steps)),
        point=point,
        index=dice.randrange(counts_of(topology, rank)[point]),
        detail="",
        delay=dice.uniform(0.0, 0.5 if point == "connect" else 0.03),
        seconds=seconds,
        outage=outage,
    )
