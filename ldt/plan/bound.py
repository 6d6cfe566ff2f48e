"""A time below which no plan can go, however it orders its work."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ldt.errors import PlanError
from ldt.plan.chain import Chain
from ldt.plan.costs import Costs
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
    """
    costs.check(topology)
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise PlanError(f"num_microbatches must be an int of at least 1, got {num_microbatches!r}")
    chains = {Chain.of(topology, costs, replica, split_backward) for replica in range(topology.dp)}
    return max(chain_bound(chain, num_microbatches) for chain in chains)


def chain_bound(chain: Chain, num_microbatches: int) -> float:
    """The lower bound for one replica."""
    machines: dict[object, list[Job]] = defaultdict(list)
    for chunk in range(chain.num_chunks):
        machines[chunk % chain.num_stages] += _compute_jobs(chain, chunk, num_microbatches)
    for hop in range(chain.tail if any(chain.occupancy) else 0):
        below, above = hop % chain.num_stages, (hop + 1) % chain.num_stages
        upwards, downwards = _messages(chain, hop, num_microbatches)
        machines[below, above] += upwards
        machines[above, below] += downwards
    return max(_preemptive_makespan(jobs) for jobs in machines.values())


def _compute_jobs(chain: Chain, chunk: int, microbatches: int) -> Iterator[Job]:
    """The forwards, backwards and weight gradients of ``chunk``."""
    forward, backward, trip = chain.forward[chunk], chain.backward[chunk], chain.round_trips[chunk]
    before, after = slice(0, chunk), slice(chunk + 1, None)
    pair = chain.forward[-1] + chain.backward[-1]  # the tail's, and then the longest of the others
    arrivals = max((*chain.forward[before], *chain.occupancy[before]), default=0.0)
    departures = max((*chain.backward[before], *chain.occupancy[before]), default=0.0)
    returns = max(pair, *chain.forward, *chain.backward[after], *chain.occupancy)
    rests = max(pair, *chain.backward, *chain.forward[after], *chain.occupancy)
    for k in range(microbatches):
        j = microbatches - 1 - k
        yield Job(
            chain.heads[chunk] + k * arrivals,
            forward,
            trip + backward + chain.tails[chunk] + j * rests,
        )
        start = chain.heads[chunk] + forward + trip + k * returns
        yield Job(start, backward, chain.tails[chunk] + j * departures)
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
