"""Checks the contents and the order of a single row."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ldt.plan.action import Action, Kind
from ldt.plan.message import message_into, message_out_of
from ldt.plan.plan import Plan
from ldt.topology import Node

__all__ = ["missing_actions", "prerequisites", "rejection_reason"]


def rejection_reason(plan: Plan, node: Node, action: Action) -> str | None:
    """Return why ``action`` cannot be in the row of ``node``; None if it can."""
    topology, kind = plan.topology, action.kind
    if not 0 <= action.chunk < topology.num_chunks:
        return f"there is no chunk {action.chunk}, chunks are 0 to {topology.tail}"
    if topology.stage_of(action.chunk) != node.stage:
        return f"chunk {action.chunk} is on stage {topology.stage_of(action.chunk)}"
    if (action.microbatch is None) != (kind is Kind.REDUCE_GRAD):
        return "REDUCE_GRAD has no microbatch, every other action has one"
    if action.microbatch is not None:
        share = topology.microbatches_of(node, plan.num_microbatches)
        if action.microbatch not in share:
            return _not_in(share, plan.num_microbatches)
    if not plan.training and kind not in (Kind.F, Kind.SEND_F, Kind.RECV_F):
        return "this plan is forward-only"
    if kind is Kind.REDUCE_GRAD and topology.replicas(node.stage) == 1:
        return f"stage {node.stage} has one replica, so there is nothing to reduce"
    if kind.is_comm:
        if plan.lanes is None:
            return "this plan has no communication (lanes=None)"
        if not plan.topology.crosses(action.hop):
            return "the neighbouring chunk is not on another node"
    return None


def missing_actions(plan: Plan, node: Node, row: Collection[Action]) -> Iterator[tuple[Action, Action]]:
    """Yield pairs of an action and another that its row requires as well but does not have."""
    for chunk in plan.topology.chunks_of(node.stage):
        for microbatch in plan.topology.microbatches_of(node, plan.num_microbatches):
            for action in _computes(plan, chunk, microbatch, row):
                expected = [action, *_messages(plan, action)]
                yield from ((action, other) for other in expected if other not in row)
        reduce = Action(chunk, Kind.REDUCE_GRAD)
        if plan.training and plan.topology.replicas(node.stage) > 1 and reduce not in row:
            yield Action(chunk, Kind.B, plan.num_microbatches - 1), reduce


def _not_in(share: range, num_microbatches: int) -> str:
    if share.step == 1:
        return f"microbatches are 0 to {num_microbatches - 1}"
    first = ", ".join(map(str, share[:8])) or "none"
    return (
        f"of the {num_microbatches} microbatches of its edge replica, dealt to {share.step} cloud replicas in turn, "
        f"it has {first}{', ...' if len(share) > 8 else ''}"
    )


def prerequisites(plan: Plan, action: Action, row: Collection[Action]) -> Iterator[Action]:
    """Yield the actions of the same row that must come before ``action``."""
    chunk, kind, microbatch = action
    if kind is Kind.REDUCE_GRAD:
        last = (Action(chunk, kind, m) for m in range(plan.num_microbatches) for kind in (Kind.B, Kind.W))
        yield from (other for other in last if other in row)
    elif kind is Kind.SEND_F:
        yield Action(chunk, Kind.F, microbatch)
    elif kind is Kind.SEND_B:
        yield _backward(chunk, microbatch, row)
    elif kind is Kind.W:
        yield Action(chunk, Kind.I, microbatch)
    elif kind.is_compute:
        if kind is not Kind.F:
            yield Action(chunk, Kind.F, microbatch)
        yield from _input(plan, action, row)


def _input(plan: Plan, action: Action, row: Collection[Action]) -> Iterator[Action]:
    source = message_into(action)
    if source is None or (action.chunk == plan.topology.tail and action.kind is not Kind.F):
        return
    hop, direction = source
    if not plan.topology.crosses(hop):
        local = Action(hop, Kind.F, action.microbatch)
        yield local if direction == "F" else _backward(hop + 1, action.microbatch, row)
    elif plan.lanes is not None:
        yield Action.send_of(hop, direction, action.microbatch).counterpart


def _backward(chunk: int, microbatch: int | None, row: Collection[Action]) -> Action:
    """The action that computes the input gradient: a full backward or, if the row splits it, the I."""
    split = Action(chunk, Kind.I, microbatch)
    return split if split in row else Action(chunk, Kind.B, microbatch)


def _computes(plan: Plan, chunk: int, microbatch: int, row: Collection[Action]) -> list[Action]:
    kinds = [Kind.F]
    if plan.training:
        split = any(Action(chunk, kind, microbatch) in row for kind in (Kind.I, Kind.W))
        kinds += [Kind.I, Kind.W] if split else [Kind.B]
    return [Action(chunk, kind, microbatch) for kind in kinds]


def _messages(plan: Plan, action: Action) -> Iterator[Action]:
    """The receive and the send of a compute action."""
    if plan.lanes is None:
        return
    source, target = message_into(action), message_out_of(action)
    if source is not None and plan.topology.crosses(source[0]):
        yield Action.send_of(*source, action.microbatch).counterpart
    if target is not None and plan.topology.crosses(target[0]):
        yield Action.send_of(*target, action.microbatch)
