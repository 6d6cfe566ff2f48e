"""Plans a step: searches an order for the given compute times, links and memory (docs/design.md, section 7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ldt.plan.action import Action
from ldt.plan.checks.verifier import prove
from ldt.plan.costs import Costs
from ldt.plan.plan import Plan
from ldt.plan.planner.lower_bound import lower_bound
from ldt.plan.planner.memory_limit import MemoryLimit
from ldt.plan.planner.policy import Limits, Schedule
from ldt.plan.planner.policy_search import search
from ldt.plan.planner.replica_costs import ReplicaCosts
from ldt.plan.schedules.passes import add_communication, add_grad_reduction, check_buffers
from ldt.plan.schedules.u_shape import has_ushape, ushape, ushape_compute
from ldt.plan.sim.engine import Run
from ldt.plan.simulator import timeline_of
from ldt.topology import LanePolicy, Topology

__all__ = ["optimize"]

_TOLERANCE = 1e-9  # relative: rounding of sums of times
_FIXED_BUFFERS = 2  # the default of ushape


def optimize(
    topology: Topology,
    num_microbatches: int,
    costs: Costs,
    *,
    memory_limit: int | Sequence[int] | None = None,
    memory_limit_bytes: float | Sequence[float] | None = None,
    split_backward: bool = False,
    lanes: LanePolicy = "dedicated",
    receive_buffers: int | None = None,
) -> Plan:
    """Return a complete, verified plan with the shortest simulated time found for ``costs``.

    The plan is never slower than ``ushape`` (if that satisfies the memory limit), and the same on every machine. The
    time that counts is the one with every message as late as ``costs.jitter`` says, so that late ones have work to hide
    behind; without lateness another plan may be faster.
    Of two equally fast plans the search prefers the one that needs less memory, even without a limit.

    Args:
        topology: The stages and replicas to plan for.
        num_microbatches: Of each edge replica.
        costs: Compute times, links and activation sizes.
        memory_limit: How many activations a node may keep at once, one per chunk and microbatch as in
            ``Timeline.peak_live``. One number or one per stage.
        memory_limit_bytes: Limit of ``Timeline.peak_bytes``. One number or one per stage.
        split_backward: Allow a backward in two parts, I and W. Never makes the plan slower.
        lanes: The lane policy that sends and receives are placed for.
        receive_buffers: How many messages of a channel may be received ahead of their use. None: as many as
            the link needs.

    Raises:
        PlanError: if the costs do not fit the topology, or if no plan satisfies the limit; the error names the
            smallest limit that works.
    """
    costs.check(topology)
    costs = costs.with_every_message_late(topology)
    check_buffers(receive_buffers)
    memory = MemoryLimit.of(topology, costs, memory_limit, memory_limit_bytes)
    splits = (True, False) if split_backward else (False,)  # two parts may cost more than the whole
    bound = min(lower_bound(topology, num_microbatches, costs, split_backward=split) for split in splits)
    task = _Task(topology, num_microbatches, costs, memory, lanes, receive_buffers)
    best: _Candidate | None = None
    for candidate in _candidates(task, splits):
        if best is None or candidate.makespan < best.makespan * (1 - _TOLERANCE):
            best = candidate
        if best.makespan <= bound * (1 + _TOLERANCE):
            break
    assert best is not None
    if best.makespan <= bound * (1 + _TOLERANCE):
        return best.plan
    fixed = _better_fixed(task, best.makespan)
    return best.plan if fixed is None else fixed


class _Task(NamedTuple):
    """The arguments of ``optimize``."""

    topology: Topology
    num_microbatches: int
    costs: Costs
    memory: MemoryLimit
    lanes: LanePolicy
    receive_buffers: int | None


class _Candidate(NamedTuple):
    plan: Plan
    makespan: float


def _candidates(task: _Task, splits: Sequence[bool]) -> Iterator[_Candidate]:
    """The plans found by the search, proven and timed by the engine."""
    for split in splits:
        plan = add_communication(_searched(task, split), task.lanes, task.receive_buffers, task.costs)
        yield _Candidate(plan, _makespan(prove(plan, task.costs, task.lanes)))


def _searched(task: _Task, split: bool) -> Plan:
    """The compute rows of the best policy found.

    The scheduler's edges send alike. Where several share a pipe, it is the engine that tells which policy is the best.
    """
    limits = Limits(task.memory.capacity, task.memory.weights, task.receive_buffers)
    costs = ReplicaCosts.slowest(task.topology, task.costs, split)
    found = search(costs, task.num_microbatches, limits)
    if costs.edge_dp == 1 or costs.pipe_pace == 0:
        return _rows(task, found[0])
    plans = [_rows(task, schedule) for schedule in found if schedule.makespan < float("inf")]
    return min(plans, key=lambda plan: _makespan(prove(plan, task.costs, None)))


def _rows(task: _Task, found: Schedule) -> Plan:
    """Compute rows and reductions. Replicas with the same turn have equal rows, so they reduce alike."""
    topology, microbatches = task.topology, task.num_microbatches
    rows = {}
    for node in topology.nodes:
        share = topology.microbatches_of(node, microbatches)
        row = found.row(node.stage, topology.turn_of(node))
        rows[node] = [
            Action(scheduled.chunk, scheduled.kind, share[scheduled.microbatch]) for scheduled in row
        ]
    return add_grad_reduction(Plan(topology, microbatches, rows))


def _better_fixed(task: _Task, makespan: float) -> Plan | None:
    """The plan of ``ushape`` if it is allowed and shorter than ``makespan``."""
    if not has_ushape(task.topology):
        return None
    rows = add_grad_reduction(ushape_compute(task.topology, task.num_microbatches))
    if _makespan(prove(rows, task.costs, None)) >= makespan * (1 - _TOLERANCE):
        return None  # communication cannot make it shorter
    buffers = task.receive_buffers or _FIXED_BUFFERS
    plan = ushape(task.topology, task.num_microbatches, lanes=task.lanes, receive_buffers=buffers)
    run = prove(plan, task.costs, task.lanes)
    allowed = task.memory.allows(timeline_of(plan, run), task.costs)
    return plan if allowed and _makespan(run) < makespan else None


def _makespan(run: Run) -> float:
    return max(computed.end for computed in run.computed)
