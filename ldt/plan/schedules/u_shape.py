"""Generates the fixed U-shaped one-forward-one-backward schedule (docs/design.md, section 7)."""

from __future__ import annotations

from itertools import groupby

from ldt.errors import PlanError
from ldt.plan.action import Action, Kind
from ldt.plan.checks.verifier import verify
from ldt.plan.counts import Counts, check_num_microbatches, warmup_counts
from ldt.plan.plan import Plan
from ldt.plan.schedules.forward_only import forward_only_row
from ldt.plan.schedules.passes import add_communication, add_grad_reduction
from ldt.topology import LanePolicy, Node, Topology

__all__ = ["has_ushape", "ushape", "ushape_compute"]

_MOST_LAPS = 2


def ushape(
    topology: Topology,
    num_microbatches: int,
    *,
    training: bool = True,
    lanes: LanePolicy = "dedicated",
    receive_buffers: int = 2,
) -> Plan:
    """Return the complete, verified plan of the fixed schedule.

    Args:
        topology: The stages and replicas to plan for.
        num_microbatches: Of each edge replica. An edge replica that serves several cloud replicas repeats each
            action for each of them in turn.
        training: False gives a forward-only plan for evaluation.
        lanes: The lane policy that sends and receives are placed for.
        receive_buffers: How many receives of a channel may be posted ahead of their use. Paired lanes may need more:
            see ``buffers_needed``.

    Raises:
        PlanError: if ``num_microbatches`` is not an int of at least 1, to train also for more than two laps or
            a ``placement`` of chunks.
    """
    plan = add_grad_reduction(ushape_compute(topology, num_microbatches, training))
    plan = add_communication(plan, lanes, receive_buffers)
    verify(plan)
    return plan


def has_ushape(topology: Topology) -> bool:
    """Whether there is a fixed schedule to train in this topology."""
    return topology.is_looped and topology.laps <= _MOST_LAPS


def ushape_compute(topology: Topology, num_microbatches: int, training: bool = True) -> Plan:
    """Return only the compute actions of the fixed schedule."""
    check_num_microbatches(num_microbatches)  # first, because writing a row counts down to 0
    if training and not has_ushape(topology):
        raise PlanError(
            f"ushape supports one and two laps and no placement, got {topology.to_text()}: use ldt.plan.optimize, "
            "from_csv, or write the rows yourself"
        )
    rows = {node: _row_of(topology, num_microbatches, node, training) for node in topology.nodes}
    return Plan(topology, num_microbatches, rows, lanes=None, training=training)


def _row_of(topology: Topology, num_microbatches: int, node: Node, training: bool) -> list[Action]:
    """Return the row for one cloud replica, with each microbatch repeated for every replica that ``node`` serves.

    A forward and the backward right behind it, as in the tail, stay together, so that the gradient is sent at once.
    """
    microbatches = topology.microbatches_of(node, num_microbatches)
    served = len(topology.cloud_replicas(node))
    row = []
    order = _stage_row(topology, -(-len(microbatches) // served), node.stage, training)
    for (_, turn), run in groupby(order, key=lambda action: (action.chunk, action.microbatch or 0)):
        together = list(run)
        for microbatch in microbatches[turn * served : (turn + 1) * served]:
            row += [action._replace(microbatch=microbatch) for action in together]
    return row


def _stage_row(topology: Topology, num_microbatches: int, stage: int, training: bool) -> list[Action]:
    if not training:
        return forward_only_row(topology, num_microbatches, stage)
    counts = warmup_counts(topology.num_stages, num_microbatches, topology.laps, stage)
    row = _Row(num_microbatches)
    if topology.laps == 2:
        _two_laps(row, counts, topology.chunks_of(stage), stage == 0)
    elif stage == 0:
        _one_lap_edge(row, counts, *topology.chunks_of(stage))
    else:
        _one_lap_cloud(row, counts, *topology.chunks_of(stage))
    return row.actions


class _Row:
    """A row under construction: each ``take`` appends the chunk's next microbatch of a kind, while any is left."""

    def __init__(self, num_microbatches: int) -> None:
        self.actions: list[Action] = []
        self._total = num_microbatches
        self._taken: dict[tuple[int, Kind], int] = {}

    def left(self, chunk: int, kind: Kind) -> int:
        return self._total - self._taken.get((chunk, kind), 0)

    def take(self, chunk: int, kind: Kind) -> None:
        microbatch = self._taken.get((chunk, kind), 0)
        if microbatch < self._total:
            self.actions.append(Action(chunk, kind, microbatch))
            self._taken[chunk, kind] = microbatch + 1

    def take_pair(self, chunk: int) -> None:
        """Append a forward and its backward, as the tail runs them."""
        self.take(chunk, Kind.F)
        self.take(chunk, Kind.B)


def _one_lap_edge(row: _Row, counts: Counts, head: int, tail: int) -> None:
    for _ in range(counts.first):
        row.take(head, Kind.F)
    for _ in range(counts.tail):
        row.take_pair(tail)
    while row.left(head, Kind.B):
        row.take(head, Kind.F)
        row.take_pair(tail)
        row.take(head, Kind.B)


def _one_lap_cloud(row: _Row, counts: Counts, chunk: int) -> None:
    for _ in range(counts.first):
        row.take(chunk, Kind.F)
    while row.left(chunk, Kind.B):
        row.take_pair(chunk)


def _two_laps(row: _Row, counts: Counts, chunks: tuple[int, ...], edge: bool) -> None:
    first, second = chunks[:2]
    for _ in range(counts.first):
        row.take(first, Kind.F)
    for microbatch in range(counts.second):
        row.take(second, Kind.F)
        if microbatch >= counts.tail - 1:
            row.take(first, Kind.F)
    for _ in range(counts.tail if edge else 0):
        row.take_pair(chunks[-1])
    for turn in range(row.left(second, Kind.B)):
        row.take(second, Kind.F)
        if turn + counts.second >= counts.tail - 1:
            row.take(first, Kind.F)
        if edge:
            row.take_pair(chunks[-1])
        row.take(second, Kind.B)
        if turn >= counts.tail:
            row.take(first, Kind.B)
    while row.left(first, Kind.B):
        row.take(first, Kind.B)
