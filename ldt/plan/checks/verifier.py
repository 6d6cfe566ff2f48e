"""Proves a plan before any process starts: each row, both ends of each lane, then a run with rendezvous."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NoReturn

from ldt.errors import PlanError
from ldt.plan.action import Action, Kind
from ldt.plan.checks.error_context import error_context
from ldt.plan.checks.row_checks import missing_actions, prerequisites, rejection_reason
from ldt.plan.costs import UNIT_COSTS, Costs
from ldt.plan.message import Message
from ldt.plan.plan import Plan
from ldt.plan.sim.engine import Run, run
from ldt.topology import LanePolicy, Node, lanes

__all__ = ["prove", "verify"]


def verify(plan: Plan, lanes: LanePolicy | None = None, *, lockstep: Collection[int] = ()) -> None:
    """Raise PlanError, which shows the rows and marks the action, unless ``plan`` is proven to work.

    Verifies that

    - each action is present exactly once, on its chunk's node, and after the actions of its row that it depends on;
    - every receive has its send, and both ends of each lane have the same order;
    - the replicas of a stage reduce its chunks in the same order;
    - the plan does not deadlock in a run where a message is transferred only at the head of both its queues and a
      reduction waits for all replicas.

    Args:
        plan: The plan to verify.
        lanes: Verify for another lane policy than the plan's own. A plan without communication has none.
        lockstep: Stages whose replicas synchronize in every action, as layers in ``fully_shard`` do, which gather
            their weights in each forward and backward. Those replicas must run their chunks in the same order.
    """
    if lanes is not None and plan.lanes is None:
        raise PlanError(
            "this plan has no communication yet and cannot be verified for lanes: use add_communication first"
        )
    prove(plan, UNIT_COSTS, lanes or plan.lanes, lockstep)


def prove(plan: Plan, costs: Costs, policy: LanePolicy | None, lockstep: Collection[int] = ()) -> Run:
    """Verify ``plan`` and return its run with ``costs``, which is the last check."""
    for node in plan.rows:
        _check_row(plan, node)
    _check_replicas_agree(plan, _is_reduction, "reduce its chunks")
    for stage in lockstep:
        _check_replicas_agree(
            plan, _is_compute, "run its chunks, as layers in fully_shard gather them,", {stage}
        )
    if policy is not None:
        _check_lane_order(plan, policy)
    result = run(plan, costs, policy, lockstep)
    if result.stuck:
        _fail_deadlock(plan, result, policy)
    return result


def _fail(plan: Plan, problem: str, positions: dict[Node, int]) -> NoReturn:
    raise PlanError(f"{problem}\n{error_context(plan, positions)}")


def _check_row(plan: Plan, node: Node) -> None:
    """Check everything that depends on one row only."""
    row = plan.rows[node]
    index_of: dict[Action, int] = {}
    for index, action in enumerate(row):
        reason = rejection_reason(plan, node, action)
        if reason is not None:
            _fail(plan, f"node {node} cannot run {action}: {reason}", {node: index})
        if action in index_of:
            _fail(plan, f"node {node} has {action} twice, first as action {index_of[action]}", {node: index})
        index_of[action] = index
    for action, index in index_of.items():
        if action.kind is Kind.B and (split := action._replace(kind=Kind.I)) in index_of:
            _fail(
                plan,
                f"node {node} has both {action} and {split}: a backward is either split or not",
                {node: index},
            )
    for action, missing in missing_actions(plan, node, index_of):
        hint = ": use add_grad_reduction" if missing.kind is Kind.REDUCE_GRAD else ""
        _fail(plan, f"node {node} lacks {missing}{hint}", {node: index_of.get(action, len(row))})
    for action, index in index_of.items():
        for needed in prerequisites(plan, action, index_of):
            if index_of[needed] > index:
                _fail(plan, f"node {node} has {action} before {needed}, which it needs", {node: index})


def _check_replicas_agree(
    plan: Plan, concerns: Callable[[Action], bool], what: str, stages: Collection[int] | None = None
) -> None:
    """Check that all replicas of a stage run the actions that ``concerns`` picks in the same order."""
    for node in plan.rows:
        if stages is not None and node.stage not in stages:
            continue
        first = Node(node.stage, 0)
        own, expected = (
            [(index, action) for index, action in enumerate(plan.rows[n]) if concerns(action)]
            for n in (node, first)
        )
        if len(own) != len(expected):
            served = plan.topology.served
            raise PlanError(
                f"all replicas of a stage must {what} equally often: node {node} has {len(own)} such actions, "
                f"node {first} {len(expected)}; the number of microbatches must be a multiple of the {served} "
                "cloud replicas that each edge replica serves"
            )
        for (index, action), (first_index, first_action) in zip(own, expected, strict=True):
            if action[:2] != first_action[:2]:
                problem = (
                    f"all replicas of a stage must {what} in the same order: node {node} has {action} where node "
                    f"{first} has {first_action}"
                )
                _fail(plan, problem, {node: index, first: first_index})


def _is_reduction(action: Action) -> bool:
    return action.kind is Kind.REDUCE_GRAD


def _is_compute(action: Action) -> bool:
    return action.kind.is_compute


def _check_lane_order(plan: Plan, policy: LanePolicy) -> None:
    """Check that a lane's sends and receives between two nodes are in the same order."""
    lane_of = lanes(plan.topology, policy)
    sent: dict[object, list[tuple[Message, int]]] = {}
    received: dict[object, list[tuple[Message, int]]] = {}
    for node, index, action in _comm_actions(plan):
        channel = plan.channel_of(action, node)
        queues = sent if action.kind.is_send else received
        queue = queues.setdefault((lane_of[channel], channel.source, channel.target), [])
        assert action.microbatch is not None
        queue.append((Message(channel, action.microbatch), index))
    for key, sends in sent.items():
        for (message, index), (expected, receive_index) in zip(sends, received[key], strict=True):
            if message != expected:
                source, target = message.channel.source, message.channel.target
                _fail(
                    plan,
                    f"lane {lane_of[message.channel]}: node {source} sends {message}, "
                    f"where node {target} receives {expected}",
                    {source: index, target: receive_index},
                )


def _comm_actions(plan: Plan) -> Iterator[tuple[Node, int, Action]]:
    for node, row in plan.rows.items():
        for index, action in enumerate(row):
            if action.kind.is_comm:
                yield node, index, action


def _fail_deadlock(plan: Plan, result: Run, policy: LanePolicy | None) -> NoReturn:
    lane_of = lanes(plan.topology, policy or "dedicated")
    lines = [f"deadlock: {len(result.stuck)} of {len(plan.rows)} nodes are stuck"]
    for node, stuck in result.stuck.items():
        line = f"  node {node} waits at {plan.rows[node][stuck.position]} for "
        if stuck.message is None:
            line += f"node {' and '.join(map(str, stuck.missing))} to reach it"
        elif stuck.blocked_by is None:
            line += f"{stuck.message}, which node {stuck.message.channel.source} has not sent"
        else:
            blocker, head = stuck.blocked_by
            line += f"{stuck.message}, which is behind {head} "
            line += f"on lane {lane_of[stuck.message.channel]} at node {blocker}"
        lines.append(line)
    _fail(plan, "\n".join(lines), {node: stuck.position for node, stuck in result.stuck.items()})
