"""A pass that runs some microbatches before the others, with no receive posted ahead."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ldt.plan.action import Action, Kind
from ldt.plan.message import message_into, message_out_of
from ldt.plan.plan import Plan

__all__ = ["run_first"]


def run_first(plan: Plan, microbatches: Collection[int]) -> Plan:
    """Return the plan with ``microbatches`` first, one chunk after the other; the others follow in their order.

    In the first part every receive is posted right before the action that uses it. Give each cloud replica one
    microbatch, at the same place among its own: then no send or receive of that part waits for a later action of its
    own node, and replicas stay in lockstep.
    """
    chosen = frozenset(microbatches)
    rows = {
        node: [
            *_chunk_by_chunk(row, chosen, plan.topology.num_chunks),
            *(action for action in row if action.microbatch not in chosen),
        ]
        for node, row in plan.rows.items()
    }
    return plan.with_rows(rows, plan.lanes)


def _chunk_by_chunk(row: Sequence[Action], chosen: Collection[int], num_chunks: int) -> Iterator[Action]:
    """Yield the actions of the chosen microbatches, each receive before its use and each send after its compute."""

    def place(action: Action) -> tuple[int, int, bool]:
        forward = action.kind is Kind.F
        level = action.chunk if forward else 2 * num_chunks - action.chunk
        return level, action.microbatch or 0, action.kind is Kind.W

    in_row = {action for action in row if action.microbatch in chosen}
    for action in sorted((action for action in in_row if action.kind.is_compute), key=place):
        source, target = message_into(action), message_out_of(action)
        receive = source and Action.send_of(*source, action.microbatch).counterpart
        send = target and Action.send_of(*target, action.microbatch)
        yield from (each for each in (receive, action, send) if each in in_row)
