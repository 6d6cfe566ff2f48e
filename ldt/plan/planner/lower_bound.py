"""Computes a lower bound on the step time of every plan."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain as concatenate
from typing import NamedTuple

from ldt.errors import PlanError
from ldt.plan.costs import Costs
from ldt.plan.planner.replica_costs import Pipe, ReplicaCosts
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

    1. A job cannot start before its *head*. The k-th forward of c (from 0) starts no earlier than the chain of
       forwards and hops to c takes, plus k times the longest job of that chain: k+1 microbatches have passed
       that one machine before. The same holds for the k-th backward, with the chain up to the tail and back to c,
       and with the tail's forward and backward counted together, since they are on one node; and for the k-th
       message of a hop and direction.
    2. After the job ends, the step lasts for its *tail*: the same argument from the end, with the j-th
       backward from the last and the chain from it to the head's backward. A W has no tail.
    3. Jobs of one chunk and kind, or hop and direction, are equal, so the k-th to start is the (M-1-k)-th from the
       last to end, and has both that head and that tail.
    4. For any set S of jobs of the machine, the step lasts at least min head + sum of durations + min tail
       over S. The largest of these over all S is what Jackson's preemptive rule attains (Carlier, The
       one-machine sequencing problem, 1982): at any time, run the available job with the longest tail.

    The bound is the largest over all machines; the critical path of one microbatch is among those sets.

    Two things differ where an edge replica serves s > 1 cloud replicas. First, its own node has the jobs of all of
    them. If the longest job is the edge's own, k+1 microbatches have passed one machine. For a job elsewhere, one
    of the replicas has had at least ceil((k+1) / s) of them, so it counts floor(k / s) times. Which replica that is
    depends on the order, so the chain uses the times of the fastest. The same holds for a pipe between two sites, which
    has the messages of all edge replicas. Second, the nodes of a cloud replica and the links within its site have
    only its own microbatches; dropping the others makes no order of the rest longer. But among any n of the
    replicas, one has its first forward on the edge behind those of the n - 1 others, and one has its last backward
    before theirs. So the smallest bound of the n holds with n - 1 times the longer of the two on top (of forwards
    only if W, which has no tail, is separate).
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


def _bound(groups: Sequence[Sequence[ReplicaCosts]], num_microbatches: int) -> float:
    """The lower bound for groups of replicas, each with an edge replica that serves them in turn."""
    merged = {replicas: ReplicaCosts.merged(min, replicas) for replicas in map(tuple, groups)}
    alone = (_group_bound(edge, replicas, num_microbatches) for replicas, edge in merged.items())
    return max(_pipe_bound([merged[tuple(replicas)] for replicas in groups], num_microbatches), *alone)


def _group_bound(edge: ReplicaCosts, replicas: Sequence[ReplicaCosts], num_microbatches: int) -> float:
    """The bound from the nodes and the links within sites of ``replicas`` and of their edge."""
    jobs = (_compute_jobs(edge, chunk, num_microbatches, edge.served) for chunk in edge.chunks_of(0))
    shares = [pair for pair in zip(replicas, edge.shares(num_microbatches), strict=True) if pair[1]]
    alone = {pair: _cloud_bound(*pair) for pair in set(shares)}
    longest_first = sorted((alone[pair] for pair in shares), reverse=True)
    edge_job = max(edge.forward[0], edge.backward[0] if edge.weight is None else 0.0)
    return max(
        _preemptive_makespan(concatenate.from_iterable(jobs)),
        *(bound + others * edge_job for others, bound in enumerate(longest_first)),
    )


def _cloud_bound(costs: ReplicaCosts, num_microbatches: int) -> float:
    """The bound from the cloud nodes of one replica with ``num_microbatches`` and the links within its site."""
    machines: dict[object, list[Job]] = defaultdict(list)
    for stage in range(1, costs.num_stages):
        for chunk in costs.chunks_of(stage):
            machines[stage] += _compute_jobs(costs, chunk, num_microbatches, served=1)
    for (below, above, pipe), jobs in _messages(costs, num_microbatches, served=1):
        if pipe is None:
            machines[below, above] += jobs
    return max((_preemptive_makespan(jobs) for jobs in machines.values()), default=0.0)


def _pipe_bound(edges: Sequence[ReplicaCosts], num_microbatches: int) -> float:
    """The bound from the pipes, which carry the messages of all ``edges`` and the replicas that they serve."""
    found = {edge: list(_messages(edge, num_microbatches, edge.served)) for edge in set(edges)}
    machines: dict[object, list[Job]] = defaultdict(list)
    for edge in edges:
        for (_, _, pipe), jobs in found[edge]:
            if pipe is not None:
                machines[pipe] += jobs
    return max((_preemptive_makespan(jobs) for jobs in machines.values()), default=0.0)


class _Pace(NamedTuple):
    """The longest job that the microbatches of ``served`` replicas must pass: on the edge or a pipe, and elsewhere."""

    edge: float
    elsewhere: float
    served: int

    @classmethod
    def of(
        cls, costs: ReplicaCosts, served: int, forwards: range, up: range, backwards: range, down: range
    ) -> _Pace:
        """The longest of these chunks' forwards, hops' activations, chunks' backwards and hops' gradients."""
        edge, elsewhere = [0.0], [0.0]
        for times, chunks in ((costs.forward, forwards), (costs.backward, backwards)):
            for chunk in chunks:
                (elsewhere if chunk % costs.num_stages else edge).append(times[chunk])
        for over, pipes, hops in (
            (costs.forwards_over, costs.forward_pipes, up),
            (costs.backwards_over, costs.backward_pipes, down),
        ):
            for hop in hops:
                (elsewhere if pipes[hop] is None else edge).append(over[hop])
        if costs.tail in forwards or costs.tail in backwards:  # both are between a forward and its backward
            edge.append(costs.forward[-1] + costs.backward[-1])
        return cls(max(edge), max(elsewhere), served)

    def delay(self, count: int) -> float:
        """Seconds by which the last of ``count`` + 1 microbatches trails the earliest possible time of the first."""
        return max(count * self.edge, count // self.served * self.elsewhere)


def _compute_jobs(costs: ReplicaCosts, chunk: int, microbatches: int, served: int) -> Iterator[Job]:
    """The forwards, backwards and weight gradients of ``chunk`` for all ``served`` replicas."""
    forward, backward, trip = costs.forward[chunk], costs.backward[chunk], costs.round_trips[chunk]
    none, before, after = range(0), range(chunk), range(chunk + 1, costs.num_chunks)
    chunks, hops, later_hops = range(costs.num_chunks), range(costs.tail), range(chunk, costs.tail)
    arrivals = _Pace.of(costs, served, before, before, none, none)
    departures = _Pace.of(costs, served, none, none, before, before)
    returns = _Pace.of(costs, served, chunks, hops, after, later_hops)
    rests = _Pace.of(costs, served, after, later_hops, chunks, hops)
    for k in range(microbatches):
        j = microbatches - 1 - k
        yield Job(
            costs.heads[chunk] + arrivals.delay(k),
            forward,
            trip + backward + costs.tails[chunk] + rests.delay(j),
        )
        start = costs.heads[chunk] + forward + trip + returns.delay(k)
        yield Job(start, backward, costs.tails[chunk] + departures.delay(j))
        if costs.weight is not None:
            yield Job(start + backward, costs.weight[chunk], 0.0)


def _messages(
    costs: ReplicaCosts, microbatches: int, served: int
) -> Iterator[tuple[tuple[int, int, Pipe], list[Job]]]:
    """The messages that take time, by the stages that they go between and their pipe, for all ``served`` replicas."""
    none, chunks, hops = range(0), range(costs.num_chunks), range(costs.tail)
    for hop in hops:
        before, after = range(hop + 1), range(hop + 1, costs.num_chunks)
        earlier_hops, later_hops = range(hop), range(hop + 1, costs.tail)
        ends = hop % costs.num_stages, (hop + 1) % costs.num_stages
        head = costs.heads[hop] + costs.forward[hop]
        rest = costs.forward[hop + 1] + costs.round_trips[hop + 1] + costs.backward[hop + 1]
        if over := costs.forwards_over[hop]:
            arrivals = _Pace.of(costs, served, before, earlier_hops, none, none)
            rests = _Pace.of(costs, served, after, later_hops, chunks, hops)
            tail = costs.latency[hop] + rest + costs.tails[hop + 1]
            yield (*ends, costs.forward_pipes[hop]), _paced(head, over, tail, arrivals, rests, microbatches)
        if over := costs.backwards_over[hop]:
            returns = _Pace.of(costs, served, chunks, hops, after, later_hops)
            departures = _Pace.of(costs, served, none, none, before, earlier_hops)
            head, tail = costs.heads[hop + 1] + rest, costs.tails[hop + 1] - over
            yield (
                (*ends[::-1], costs.backward_pipes[hop]),
                _paced(head, over, tail, returns, departures, microbatches),
            )


def _paced(
    head: float, duration: float, tail: float, earlier: _Pace, later: _Pace, microbatches: int
) -> list[Job]:
    """Equal jobs, the k-th of them behind k earlier ones and before all later ones."""
    return [
        Job(head + earlier.delay(k), duration, tail + later.delay(microbatches - 1 - k))
        for k in range(microbatches)
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
