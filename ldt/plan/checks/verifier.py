"""Proof of a plan before a process starts: each row, both ends of each lane, then a run with rendezvous."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NoReturn

from ldt.errors import PlanError
from ldt.plan.action import Action, Kind
from ldt.plan.checks.error_context import error_context
from ldt.plan.checks.row_checks import missing_actions, needed_before, refuse_reason
from ldt.plan.costs import UNIT_COSTS, Costs
from ldt.plan.message import Message
from ldt.plan.plan import Plan
from ldt.plan.sim.engine import Run, run
from ldt.topology import LanePolicy, Node, lanes

__all__ = ["prove", "verify"]


def verify(plan: Plan, lanes: LanePolicy | None = None, *, lockstep: Collection[int] = ()) -> None:
    """Raise PlanError, with the grid and the place marked, unless ``plan`` is proven to work.

    Proven are: each action is there exactly once and on its chunk's node; every action comes after what it
    needs on its node, so every forward before its backward; every receive has its send and both ends of each
    lane have one order; the replicas of a stage reduce its chunks in one order; and no deadlock, by a run in
    which a message passes only at the head of both its queues and a reduction waits for all replicas.
    ``lanes`` proves the plan for another lane policy than its own. A plan without communication is proven as
    such. ``lockstep`` are stages whose replicas meet in all they do, as with layers in ``fully_shard``, which
    gather their weights from them in each forward and backward: those replicas must have one order of chunks.
    """
    if lanes is not None and plan.lanes is None:
        raise PlanError(
            "this plan has no communication yet, so it cannot be verified for lanes: use add_communication"
        )
    prove(plan, UNIT_COSTS, lanes or plan.lanes, lockstep)


def prove(plan: Plan, costs: Costs, policy: LanePolicy | None, lockstep: Collection[int] = ()) -> Run:
    """Verify ``plan``, running it with ``costs`` in the last step, and return that run."""
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


def _fail(plan: Plan, problem: str, places: dict[Node, int]) -> NoReturn:
    raise PlanError(f"{problem}\n{error_context(plan, places)}")


def _check_row(plan: Plan, node: Node) -> None:
    """Everything that one row tells by itself."""
    row = plan.rows[node]
    index_of: dict[Action, int] = {}
    for index, action in enumerate(row):
        reason = refuse_reason(plan, node, action)
        if reason is not None:
            _fail(plan, f"node {node} cannot run {action}: {reason}", {node: index})
        if action in index_of:
            _fail(plan, f"node {node} has {action} twice, first as action {index_of[action]}", {node: index})
        index_of[action] = index
    for action, index in index_of.items():
        if action.kind is Kind.B and (split := action._replace(kind=Kind.I)) in index_of:
            _fail(
                plan,
                f"node {node} has both {action} and {split}: split a backward or leave it",
                {node: index},
            )
    for action, missing in missing_actions(plan, node, index_of):
        hint = ": use add_grad_reduction" if missing.kind is Kind.REDUCE_GRAD else ""
        _fail(plan, f"node {node} lacks {missing}{hint}", {node: index_of.get(action, len(row))})
    for action, index in index_of.items():
        for needed in needed_before(plan, action, index_of):
            if index_of[needed] > index:
                _fail(plan, f"node {node} has {action} before {needed}, which it needs", {node: index})


def _check_replicas_agree(
    plan: Plan, concerns: Callable[[Action], bool], what: str, stages: Collection[int] | None = None
) -> None:
    """Replicas of a stage meet in the actions that ``concerns`` picks: chunks and kinds must come in one order."""
    for node in plan.rows:
        if stages is not None and node.stage not in stages:
            continue
        first = Node(node.stage, 0)
        ours, theirs = (
            [(index, action) for index, action in enumerate(plan.rows[n]) if concerns(action)]
            for n in (node, first)
        )
        if len(ours) != len(theirs):
            served = plan.topology.served
            raise PlanError(
                f"all replicas of a stage must {what} equally often: node {node} has {len(ours)} actions for that, "
                f"node {first} {len(theirs)}; the number of microbatches must be a multiple of the {served} "
                "replicas that each one of the edge serves"
            )
        for (index, action), (first_index, first_action) in zip(ours, theirs, strict=True):
            if action[:2] != first_action[:2]:
                problem = (
                    f"all replicas of a stage must {what} in one order: node {node} has {action} where node {first} "
                    f"has {first_action}"
                )
                _fail(plan, problem, {node: index, first: first_index})


def _is_reduction(action: Action) -> bool:
    return action.kind is Kind.REDUCE_GRAD


def _is_compute(action: Action) -> bool:
    return action.kind.is_compute


def _check_lane_order(plan: Plan, policy: LanePolicy) -> None:
    """Between two nodes, a lane's sends and its receives must be in one order."""
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
    lines = [f"deadlock: {len(result.stuck)} of {len(plan.rows)} nodes cannot go on"]
    for node, stuck in result.stuck.items():
        line = f"  node {node} waits at {plan.rows[node][stuck.place]} for "
        if stuck.message is None:
            line += f"node {' and '.join(map(str, stuck.absent))} to come to it, too"
        elif stuck.behind is None:
            line += f"{stuck.message}, which node {stuck.message.channel.source} has not sent"
        else:
            blocker, head = stuck.behind
            line += f"{stuck.message}, which is behind {head} "
            line += f"on lane {lane_of[stuck.message.channel]} at node {blocker}"
        lines.append(line)
    _fail(plan, "\n".join(lines), {node: stuck.place for node, stuck in result.stuck.items()})
