"""What a run of the job is, and the fault that a seed stands for: pure data, the same wherever it is drawn."""

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
    "Point",
    "draw",
]

FaultKind = Literal[
    "exception", "kill", "exit", "drop", "corrupt", "memory", "disk_full", "pause", "slow", "stop"
]
Point = Literal["action", "forward", "backward", "loss", "data", "optimizer", "save"]

KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
QUIET: tuple[FaultKind, ...] = ("pause", "slow")  # of which no rank may notice anything
STEPS = 6
SAVE_EVERY = 2
SHAPES = (
    Topology([1, 1, 1]),
    Topology([1, 2]),
    Topology([2, 1]),
    Topology([1, 1], dp=2),
)
MICROBATCHES = 3  # in each step, on each replica of the edge
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
    "corrupt": ("letter_head", "step_message", "sum", "failure_key", "call_key"),
}


@dataclass(frozen=True)
class Fault:
    """``kind`` on ``rank`` of ``topology`` in step ``step``, when it comes to ``point`` for the ``index``-th time.

    The ends of an action are points as well as its begin. While saving, the fault comes ``delay`` seconds later.
    """

    seed: int
    kind: FaultKind
    topology: Topology
    rank: int
    step: int
    point: Point
    index: int
    detail: str
    delay: float

    def __str__(self) -> str:
        what = f"{self.kind} ({self.detail})" if self.detail else self.kind
        later = f" after {self.delay * 1e3:.1f} ms" if self.point == "save" else ""
        return (
            f"seed {self.seed}: {what} on rank {self.rank} of {self.topology.to_text()} in step {self.step}, "
            f"{self.point} {self.index}{later}"
        )


def draw(seed: int) -> Fault:
    """The fault of a seed. Seeds in a row take the kinds in turn."""
    dice = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    topology = dice.choice(SHAPES)
    detail = dice.choice(_DETAILS.get(kind, ("",)))
    leaders = [rank for rank in range(topology.world_size) if topology.tp_rank_of(rank) == 0]
    ranks = range(topology.world_size)
    if detail in ("letter_head", "step_message"):  # only leaders of the edge write those
        ranks = [rank for rank in leaders if topology.node_of(rank).stage == 0]
    rank = dice.choice(ranks)
    counts = _counts(topology, rank)
    point = dice.choice([point for point in _POINTS.get(kind, _ANYWHERE) if counts[point]])
    # Neither the first step, which has none before it, nor the last one, after which nobody waits for anybody.
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


def _counts(topology: Topology, rank: int) -> dict[Point, int]:
    """How often a step comes to each point on that rank."""
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
    }
