"""Computes a lower bound on the step time of every plan."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain as concatenate
from typing import NamedTuple

from ldt.errors import PlanError
from ldt.plan.costs import Costs
from ldt.plan.planner.chain import Counts, chain_of, earliest_starts, mirrored
from ldt.plan.planner.idle import idle_times
from ldt.plan.planner.replica_costs import ReplicaCosts
from ldt.topology import Topology

__all__ = ["lower_bound", "replica_bound"]


class Job(NamedTuple):
    """Work of one machine. It cannot start before ``head``, and the step lasts for ``tail`` after its end."""

    head: float
    duration: float
    tail: float


def lower_bound(
    topology: Topology, num_microbatches: int, costs: Costs, *, split_backward: bool = False
) -> float:
    """Return a lower bound in seconds on every plan for these costs, whatever its order, lanes and memory.

    With ``split_backward`` the bound holds for plans of I and W, otherwise for plans of whole backwards.

    Proof sketch. Treat one node (or one pipe, ``Topology.pipe_of``) as a machine that runs one job at a time, and drop
    all other constraints. A job is a forward, a backward or a W of one of the node's chunks c, or a message.

    1. A job cannot start before its *head*. The k-th job of a step of the chain (from 0) starts no earlier than the
       chain before it takes, and no earlier than k+1 microbatches can pass any one machine of that chain:
       ``earliest_starts``.
    2. After the job ends, the step lasts for its *tail*: the same argument from the end, with the j-th job from the
       last. A W has no tail.
    3. Jobs of one step of the chain are equal, so the k-th to start is the (M-1-k)-th from the last to end, and has
       both that head and that tail.
    4. For any set S of jobs of the machine, the step lasts at least min head + sum of durations + min tail
       over S. The largest of these over all S is what Jackson's preemptive rule attains (Carlier, The
       one-machine sequencing problem, 1982): at any time, run the available job with the longest tail.
    5. All jobs of the machine together take as long as they do, plus what it must idle at the start and, by the same
       argument from the end, at the end, because a pipe has to bring its work first: ``idle_times``. These two times
       do not overlap if each is within a half of a lower bound.

    The bound is the largest over all machines.

    Where there are several replicas, each step of the chain has jobs of all of them, on one pipe, an edge per edge
    replica and a node of each stage per cloud replica. Of k+1 microbatches, one of n machines has had at least
    ceil((k+1) / n). n machines are no faster than one of n times the speed. Which replica is the k-th depends on the
    order, so the chain uses the times of the fastest. The same holds for the replicas of one edge alone; dropping the
    others makes no order of the rest longer. And among any n replicas of an edge, one has its first forward on the edge
    behind those of the n - 1 others, and one has its last backward before theirs. So the smallest bound of the n, each
    alone, holds with n - 1 times the longer of the two on top (of forwards only if W, which has no tail, is separate).
    """
    costs.check(topology)
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise PlanError(f"num_microbatches must be an int of at least 1, got {num_microbatches!r}")
    groups = [
        tuple(
            ReplicaCosts.of(topology, costs, replica, split_backward)
            for replica in topology.cloud_replicas(edge)
        )
        for edge in topology.nodes[: topology.edge_dp]
    ]
    return _bound(groups, num_microbatches)


def replica_bound(costs: ReplicaCosts, num_microbatches: int) -> float:
    """The lower bound if all replicas have these ``costs``."""
    return _bound([(costs,) * costs.served] * costs.edge_dp, num_microbatches)


def _bound(groups: Sequence[Sequence[ReplicaCosts]], microbatches: int) -> float:
    """The lower bound for groups of replicas, each with an edge replica that serves them in turn."""
    found = [_group_bound(replicas, microbatches) for replicas in set(map(tuple, groups))]
    if len(groups) > 1:
        every = [replica for replicas in groups for replica in replicas[:microbatches]]
        counts = (1, len(groups), len(every))
        found.append(_joint_bound(ReplicaCosts.merged(min, every), counts, microbatches * len(groups)))
    return max(found)


def _group_bound(replicas: Sequence[ReplicaCosts], microbatches: int) -> float:
    """The bound from the replicas that one edge serves: all together, and the slowest one by one."""
    replicas = replicas[:microbatches]  # the others have none
    edge = ReplicaCosts.merged(min, replicas)
    together = _joint_bound(edge, (1, 1, len(replicas)), microbatches)
    if len(replicas) == 1:
        return together
    shares = list(zip(replicas, edge.shares(microbatches), strict=False))
    alone = {pair: _joint_bound(pair[0], (1, 1, 1), pair[1]) for pair in set(shares)}
    longest_first = sorted((alone[pair] for pair in shares), reverse=True)
    edge_job = max(edge.forward[0], edge.backward[0] if edge.weight is None else 0.0)
    return max(together, *(bound + others * edge_job for others, bound in enumerate(longest_first)))


def _joint_bound(costs: ReplicaCosts, counts: Counts, microbatches: int) -> float:
    """The bound from equal replicas that have so many pipes, edges and other nodes of each stage."""
    chain = chain_of(costs)
    mirror = mirrored(chain)
    heads = list(earliest_starts(chain, counts, microbatches))
    tails = list(earliest_starts(mirror, counts, microbatches))
    jobs: dict[tuple[object, int], list[Job]] = defaultdict(list)
    for step, starts, rests in zip(chain, heads, reversed(tails), strict=True):
        if step.duration or step.weight:
            run = jobs[step.machine, step.level]
            run += [
                Job(head, step.duration, tail) for head, tail in zip(starts, reversed(rests), strict=True)
            ]
            if step.weight:
                run += [Job(head + step.duration, step.weight, 0.0) for head in starts]
    bound = max(
        (_preemptive_makespan(_merged(run, counts[level])) for (_, level), run in jobs.items()), default=0.0
    )
    bound = max(bound, chain[-1].end)
    begin, end = (
        idle_times(steps, starts, counts, bound / 2) for steps, starts in ((chain, heads), (mirror, tails))
    )
    for machine, level in jobs:
        work = microbatches * sum(step.duration for step in chain if step.machine == machine)
        idle = begin.get(machine, 0.0) + end.get(machine, 0.0)
        bound = max(bound, (work + idle) / counts[level])
    return bound


def _merged(jobs: Sequence[Job], machines: int) -> Iterable[Job]:
    """Jobs of one machine that is as fast as ``machines``, of which each has at least one job.

    That machine cannot start to work at full speed: the i-th of them idles until the i-th smallest head, at least. So
    there is a job for that, and likewise one for the time between the i-th smallest tail and the smallest.
    """
    if machines == 1:
        return jobs
    heads = heapq.nsmallest(machines, jobs)
    tails = heapq.nsmallest(machines, jobs, key=lambda job: job.tail)
    least, rest = heads[0].head, tails[0].tail
    before = [Job(least, head - least, duration + tail) for head, duration, tail in heads]
    after = [Job(head + duration, tail - rest, rest) for head, duration, tail in tails]
    return [
        Job(head, duration / machines, tail)
        for head, duration, tail in concatenate(jobs, before[1:], after[1:])
    ]


def _preemptive_makespan(jobs: Iterable[Job]) -> float:
    """The end of the last tail under Jackson's preemptive rule."""
    waiting = sorted(jobs, reverse=True)
    available: list[tuple[float, float]] = []  # (-tail, remaining duration)
    now = end = 0.0
    while waiting or available:
        if not available:
            now = max(now, waiting[-1].head)
        while waiting and waiting[-1].head <= now:
            job = waiting.pop()
            heapq.heappush(available, (-job.tail, job.duration))
        negative_tail, left = heapq.heappop(available)
        pause = waiting[-1].head if waiting else float("inf")
        if now + left > pause:
            heapq.heappush(available, (negative_tail, now + left - pause))
            now = pause
        else:
            now += left
            end = max(end, now - negative_tail)
    return end
