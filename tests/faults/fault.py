"""Draws the fault of a seed: pure data, equal in every process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

from ldt.plan import Kind, ushape
from ldt.topology import Topology

__all__ = [
    "KINDS",
    "MICROBATCHES",
    "QUIET",
    "SAVE_EVERY",
    "SHAPES",
    "STEPS",
    "Fault",
    "FaultKind",
    "LinkFaultKind",
    "Point",
    "counts_of",
    "draw",
]

FaultKind = Literal[
    "exception", "kill", "exit", "drop", "corrupt", "memory", "disk_full", "pause", "slow", "stop"
]
LinkFaultKind = Literal["outage", "long_outage", "reset"]
Point = Literal["connect", "action", "forward", "backward", "loss", "data", "optimizer", "save", "close"]

KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
QUIET: tuple[FaultKind, ...] = ("pause", "slow")  # that no rank may notice
STEPS = 6
SAVE_EVERY = 2
SHAPES = (
    Topology([1, 1, 1]),
    Topology([1, 2]),
    Topology([2, 1]),
    Topology([1, 1], dp=2),
)
MICROBATCHES = 3  # per step and edge replica
_ANYWHERE: tuple[Point, ...] = ("action", "action", "action", "optimizer", "data", "save")
_IN_PYTHON: tuple[Point, ...] = ("action", "forward", "backward", "loss", "data", "optimizer")
_POINTS: dict[FaultKind, tuple[Point, ...]] = {
    "exception": _IN_PYTHON,
    "memory": ("action", "forward", "backward", "loss", "optimizer"),
    "drop": ("action",),
    "corrupt": ("data",),
    "disk_full": ("save",),
    "slow": ("action",),
}
_DETAILS: dict[FaultKind, tuple[str, ...]] = {
    "exit": ("os._exit", "sys.exit"),
    "corrupt": ("message_head", "step_message", "sum", "failure_key", "call_key"),
}


@dataclass(frozen=True)
class Fault:
    """A ``kind`` of fault on ``rank`` of ``topology`` in step ``step``, at ``point`` for the ``index``-th time.

    The begin and the end of an action are points. While connecting and saving, it comes ``delay`` seconds later.
    """

    seed: int
    kind: FaultKind | LinkFaultKind
    topology: Topology
    rank: int
    step: int
    point: Point
    index: int
    detail: str
    delay: float
    seconds: float = 0.0  # for which the link between the sites is down
    outage: float = 0.0  # of connect

    def __str__(self) -> str:
        what = f"{self.kind} ({self.detail})" if self.detail else self.kind
        later = f" after {self.delay * 1e3:.1f} ms" if self.point in ("connect", "save") else ""
        if self.seconds:
            what += f" of {self.seconds:g} s (connect: {self.outage:g} s)"
        return (
            f"seed {self.seed}: {what} on rank {self.rank} of {self.topology.to_text()} in step {self.step}, "
            f"{self.point} {self.index}{later}"
        )


def draw(seed: int) -> Fault:
    """Draw the fault of a seed. Consecutive seeds take the kinds in turn."""
    dice = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    topology = dice.choice(SHAPES)
    detail = dice.choice(_DETAILS.get(kind, ("",)))
    leaders = [rank for rank in range(topology.world_size) if topology.tp_rank_of(rank) == 0]
    ranks = range(topology.world_size)
    if detail in ("message_head", "step_message"):  # only leaders of the edge send those
        ranks = [rank for rank in leaders if topology.node_of(rank).stage == 0]
    rank = dice.choice(ranks)
    counts = counts_of(topology, rank)
    point = dice.choice([point for point in _POINTS.get(kind, _ANYWHERE) if counts[point]])
    # Neither the first step, which has no step before it, nor the last, after which no rank waits for another.
    steps = range(SAVE_EVERY - 1, STEPS - 1, SAVE_EVERY) if point == "save" else range(1, STEPS - 1)
    return Fault(
        seed,
        kind,
        topology,
        rank,
        step=dice.choice(steps),
        point=point,
        index=dice.randrange(counts[point]),
        detail=detail,
        delay=dice.uniform(0.0, 0.03),
    )


def counts_of(topology: Topology, rank: int) -> dict[Point, int]:
    """Return how often a step reaches each point on the rank."""
    node = topology.node_of(rank)
    row = ushape(topology, num_microbatches=MICROBATCHES).rows[node]
    kinds = [action.kind for action in row]
    return {
        "action": 2 * len(row),
        "forward": kinds.count(Kind.F),
        "backward": kinds.count(Kind.B),
        "loss": MICROBATCHES if node.stage == 0 else 0,
        "data": 1,
        "optimizer": 1,
        "save": 1,
        "connect": 1,
        "close": 1,
    }
