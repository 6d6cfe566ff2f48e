"""The planner: an order fitted to compute times, links and memory (docs/design.md, section 7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ldt.plan.action import Action
from ldt.plan.checks.verifier import prove
from ldt.plan.costs import Costs
from ldt.plan.plan import Plan
from ldt.plan.planner.lower_bound import lower_bound
from ldt.plan.planner.memory_limit import MemoryLimit
from ldt.plan.planner.policy import Limits
from ldt.plan.planner.policy_search import search
from ldt.plan.planner.replica_costs import Chain
from ldt.plan.schedules.passes import add_communication, add_grad_reduction, check_buffers
from ldt.plan.schedules.u_shape import ushape, ushape_compute
from ldt.plan.sim.engine import Run
from ldt.plan.simulator import timeline_of
from ldt.topology import LanePolicy, Topology

__all__ = ["optimize"]

_TOLERANCE = 1e-9  # relative: rounding of sums of times
_FIXED_LAPS = (1, 2)  # what ushape has an order for
_FIXED_BUFFERS = 2  # and the receive buffers it has unless told otherwise


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
    """A complete, verified plan whose simulated time with ``costs`` is the shortest found.

    It is never longer than that of ``ushape`` (where that keeps to the memory limit) and the same on every
    machine. ``memory_limit`` is how many activations a node may keep at once, one per chunk and microbatch as in
    ``Timeline.peak_live``; ``memory_limit_bytes`` limits ``Timeline.peak_bytes``; each is one number or one
    per stage. Without a limit the search still prefers the smaller of two equally fast plans. With
    ``split_backward`` it may do a backward in two parts, I and W, and never gets longer by that.
    ``receive_buffers`` limits how many messages of a channel may be received ahead of their use; None: as
    many as the link asks for.

    Raises PlanError for costs that do not fit and for a limit that no plan keeps to, with the smallest that works.
    """
    costs.check(topology)
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
    """What is to be planned."""

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
    """Searched plans, proven and timed by the engine."""
    for split in splits:
        plan = add_grad_reduction(_searched(task, split))
        plan = add_communication(plan, task.lanes, task.receive_buffers, task.costs)
        yield _Candidate(plan, _makespan(prove(plan, task.costs, task.lanes)))


def _searched(task: _Task, split: bool) -> Plan:
    """The compute rows of the best rules found, the same for replicas of one turn, which reduce in one order."""
    topology, microbatches = task.topology, task.num_microbatches
    limits = Limits(task.memory.capacity, task.memory.weights, task.receive_buffers)
    found = search(Chain.slowest(topology, task.costs, split), microbatches, limits)
    rows = {}
    for node in topology.nodes:
        share = topology.microbatches_of(node, microbatches)
        row = found.row(node.stage, topology.turn_of(node))
        rows[node] = [Action(taken.chunk, taken.kind, share[taken.microbatch]) for taken in row]
    return Plan(topology, microbatches, rows)


def _better_fixed(task: _Task, makespan: float) -> Plan | None:
    """The plan of ``ushape`` if it is allowed and shorter than ``makespan``."""
    if task.topology.laps not in _FIXED_LAPS:
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
