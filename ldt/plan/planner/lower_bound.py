"""A time below which no plan can go, however it orders its work."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain as concatenate
from typing import NamedTuple

from ldt.errors import PlanError
from ldt.plan.costs import Costs
from ldt.plan.planner.replica_costs import Chain
from ldt.topology import Topology

__all__ = ["chain_bound", "lower_bound"]


class Job(NamedTuple):
    """Work of one machine: cannot start before ``head``, and the step goes on for ``tail`` after its end."""

    head: float
    duration: float
    tail: float


def lower_bound(
    topology: Topology, num_microbatches: int, costs: Costs, *, split_backward: bool = False
) -> float:
    """Seconds that every plan for these costs takes at least: any order, any lanes, any memory.

    With ``split_backward`` it holds for plans of I and W, without for plans of whole backwards.

    The argument. Take one node (or one direction of a link) as a machine that does one job at a time, and leave
    out all other rules. A job is a forward, a backward or a W of one of the node's chunks c, or a message.

    1. It cannot start before its *head*. The k-th forward of c (from 0) starts no earlier than the chain of
       forwards and hops to c takes, plus k times the longest job of that chain: k+1 microbatches have passed
       that one machine before. The k-th backward likewise, with the chain up to the tail and back to c, and
       with the tail's forward and backward counted together, since they are on one node.
    2. After its end the step goes on for its *tail*: the same argument seen from the end, with the j-th
       backward from the last and the chain from it to the head's backward. A W has no tail.
    3. Jobs of one chunk and kind are alike, so the k-th to start is the (M-1-k)-th from the last to end, and
       has both that head and that tail.
    4. For any set S of jobs of the machine, the step lasts at least min head + sum of durations + min tail
       over S. The largest of these over all S is what Jackson's preemptive rule attains (Carlier, The
       one-machine sequencing problem, 1982): at any time, do the available job of the longest tail.

    The bound is the largest over all machines; the critical path of one microbatch is among those sets.

    Where an edge replica serves s > 1 cloud replicas, two things differ. Its own node has the jobs of all of them.
    k+1 microbatches have passed one machine where the longest job is the edge's own, but of a job elsewhere one
    of the replicas has had at least ceil((k+1) / s) of them: it counts floor(k / s) times. Which one depends on
    the order, so the chain has the times of the fastest. The nodes and links of a cloud replica have its own
    microbatches; to leave out the others makes no order of the rest longer. But of any n of the replicas, one has
    its first forward on the edge behind those of the n - 1 others, and one its last backward before theirs: with
    n - 1 times the longer of the two on top (of forwards alone if W, which has no tail, is apart), the smallest
    bound of the n holds.
    """
    costs.check(topology)
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise PlanError(f"num_microbatches must be an int of at least 1, got {num_microbatches!r}")
    groups = {
        tuple(Chain.of(topology, costs, replica, split_backward) for replica in topology.cloud_replicas(edge))
        for edge in topology.nodes[: topology.edge_dp]
    }
    return max(_bound(chains, num_microbatches) for chains in groups)


def chain_bound(chain: Chain, num_microbatches: int) -> float:
    """The lower bound for one replica of the edge, where all that it serves are like ``chain``."""
    return _bound((chain,) * chain.served, num_microbatches)


def _bound(chains: Sequence[Chain], num_microbatches: int) -> float:
    """The lower bound for one replica of the edge that serves ``chains`` in turn."""
    edge = Chain.merged(min, chains)
    jobs = (_compute_jobs(edge, chunk, num_microbatches, edge.served) for chunk in edge.chunks_of(0))
    shares = [pair for pair in zip(chains, edge.shares(num_microbatches), strict=True) if pair[1]]
    alone = {pair: _cloud_bound(*pair) for pair in set(shares)}
    longest_first = sorted((alone[pair] for pair in shares), reverse=True)
    of_another = max(edge.forward[0], edge.backward[0] if edge.weight is None else 0.0)
    return max(
        _preemptive_makespan(concatenate.from_iterable(jobs)),
        *(bound + others * of_another for others, bound in enumerate(longest_first)),
    )


def _cloud_bound(chain: Chain, num_microbatches: int) -> float:
    """The bound by the cloud nodes and links of one replica that has ``num_microbatches``."""
    machines: dict[object, list[Job]] = defaultdict(list)
    for stage in range(1, chain.num_stages):
        for chunk in chain.chunks_of(stage):
            machines[stage] += _compute_jobs(chain, chunk, num_microbatches, served=1)
    for hop in range(chain.tail if any(chain.occupancy) else 0):
        below, above = hop % chain.num_stages, (hop + 1) % chain.num_stages
        upwards, downwards = _messages(chain, hop, num_microbatches)
        machines[below, above] += upwards
        machines[above, below] += downwards
    return max((_preemptive_makespan(jobs) for jobs in machines.values()), default=0.0)


class _Pace(NamedTuple):
    """The longest job, on the edge and elsewhere, that microbatches of ``served`` replicas have to pass."""

    edge: float
    elsewhere: float
    served: int

    @classmethod
    def of(cls, chain: Chain, served: int, forwards: range, backwards: range, hops: range) -> _Pace:
        """Over the forwards and backwards of these chunks and one direction of these hops."""
        edge, elsewhere = [0.0], [chain.occupancy[hop] for hop in hops]
        for times, chunks in ((chain.forward, forwards), (chain.backward, backwards)):
            for chunk in chunks:
                (elsewhere if chunk % chain.num_stages else edge).append(times[chunk])
        if chain.tail in forwards or chain.tail in backwards:  # both are between a forward and its backward
            edge.append(chain.forward[-1] + chain.backward[-1])
        return cls(max(edge), max(elsewhere, default=0.0), served)

    def delay(self, count: int) -> float:
        """Seconds by which the last of ``count`` + 1 microbatches is behind where the first can be."""
        return max(count * self.edge, count // self.served * self.elsewhere)


def _compute_jobs(chain: Chain, chunk: int, microbatches: int, served: int) -> Iterator[Job]:
    """The forwards, backwards and weight gradients of ``chunk`` for ``served`` replicas together."""
    forward, backward, trip = chain.forward[chunk], chain.backward[chunk], chain.round_trips[chunk]
    none, before, after = range(0), range(chunk), range(chunk + 1, chain.num_chunks)
    chunks, hops = range(chain.num_chunks), range(chain.tail)
    arrivals = _Pace.of(chain, served, before, none, before)
    departures = _Pace.of(chain, served, none, before, before)
    returns = _Pace.of(chain, served, chunks, after, hops)
    rests = _Pace.of(chain, served, after, chunks, hops)
    for k in range(microbatches):
        j = microbatches - 1 - k
        yield Job(
            chain.heads[chunk] + arrivals.delay(k),
            forward,
            trip + backward + chain.tails[chunk] + rests.delay(j),
        )
        start = chain.heads[chunk] + forward + trip + returns.delay(k)
        yield Job(start, backward, chain.tails[chunk] + departures.delay(j))
        if chain.weight is not None:
            yield Job(start + backward, chain.weight[chunk], 0.0)


def _messages(chain: Chain, hop: int, microbatches: int) -> tuple[list[Job], list[Job]]:
    """The transfers of ``hop``, upwards and downwards, with the plain chains as heads and tails."""
    occupancy, latency = chain.occupancy[hop], chain.latency[hop]
    after = hop + 1
    up_head = chain.heads[hop] + chain.forward[hop]
    rest = chain.forward[after] + chain.round_trips[after] + chain.backward[after]
    down_head = chain.heads[after] + rest
    upwards = Job(up_head, occupancy, latency + rest + chain.tails[after])
    downwards = Job(down_head, occupancy, chain.tails[after] - occupancy)
    return [upwards] * microbatches, [downwards] * microbatches


def _preemptive_makespan(jobs: Iterable[Job]) -> float:
    """When the last tail ends under Jackson's preemptive rule."""
    waiting = sorted(jobs, reverse=True)
    available: list[tuple[float, float]] = []  # (-tail, what is left to do)
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
