"""The costs of one replica as plain numbers per chunk and hop, for the bound and the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from ldt.plan.action import Action, Kind
from ldt.plan.costs import Costs
from ldt.topology import Direction, Topology

__all__ = ["Pipe", "ReplicaCosts"]

Pipe = str | None  # None: a link of the hop's own two nodes


@dataclass(frozen=True)
class ReplicaCosts:
    """Seconds per chunk and per hop of one replica, already divided by the nodes' speeds.

    ``backward`` is the part that the previous chunk waits for: all of it, or the input gradient if the backward
    is split. ``weight`` is then the other part, otherwise None. A message of hop c -> c+1 takes ``latency[c]`` after
    its turn on a pipe, which lasts ``forwards_over[c]`` or ``backwards_over[c]``; all are 0 where P = 1.
    ``served`` such replicas share the edge, and ``edge_dp`` such edges the pipes.
    """

    placement: tuple[int, ...]  # the stage of each chunk
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...] | None
    forwards_over: tuple[float, ...]
    backwards_over: tuple[float, ...]
    latency: tuple[float, ...]
    forward_pipes: tuple[Pipe, ...]
    backward_pipes: tuple[Pipe, ...]
    served: int = 1
    edge_dp: int = 1

    @classmethod
    def of(cls, topology: Topology, costs: Costs, replica: int = 0, split: bool = False) -> ReplicaCosts:
        """The costs of ``replica``. ``split``: backwards run as I and W."""
        nodes = [topology.node_at(chunk, replica) for chunk in range(topology.num_chunks)]
        forward, backward, weights = (
            tuple(costs.compute(Action(chunk, kind, 0), node) for chunk, node in enumerate(nodes))
            for kind in (Kind.F, Kind.I if split else Kind.B, Kind.W)
        )
        weight = weights if split else None
        ahead, back = (_crossings(topology, costs, direction) for direction in get_args(Direction))
        latency = tuple(costs.delay(hop) if topology.crosses(hop) else 0.0 for hop in range(topology.tail))
        return cls(
            topology.placement,
            forward,
            backward,
            weight,
            forwards_over=ahead[0],
            backwards_over=back[0],
            latency=latency,
            forward_pipes=ahead[1],
            backward_pipes=back[1],
            served=topology.served,
            edge_dp=topology.edge_dp,
        )

    @classmethod
    def slowest(cls, topology: Topology, costs: Costs, split: bool = False) -> ReplicaCosts:
        """For each chunk, the costs of the slowest replica."""
        return cls.merged(max, [cls.of(topology, costs, replica, split) for replica in range(topology.dp)])

    @classmethod
    def merged(
        cls, choose: Callable[[Iterable[float]], float], replicas: Sequence[ReplicaCosts]
    ) -> ReplicaCosts:
        """For each chunk, what ``choose`` picks among ``replicas``, which have equal links."""
        weights = [replica.weight for replica in replicas if replica.weight is not None]
        forward, backward, weight = (
            tuple(choose(figures) for figures in zip(*times, strict=True))
            for times in ([r.forward for r in replicas], [r.backward for r in replicas], weights)
        )
        return replace(replicas[0], forward=forward, backward=backward, weight=weight or None)

    @property
    def num_chunks(self) -> int:
        return len(self.forward)

    @property
    def tail(self) -> int:
        return len(self.forward) - 1

    @cached_property
    def num_stages(self) -> int:
        return max(self.placement) + 1

    @cached_property
    def laps(self) -> int:
        """How many chunks a stage has, the tail aside, at most."""
        return max(map(self.placement[:-1].count, range(self.num_stages)))

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks of ``stage`` in model order."""
        return tuple(chunk for chunk, its_stage in enumerate(self.placement) if its_stage == stage)

    def lap_of(self, chunk: int) -> int:
        """How many chunks before ``chunk`` are on its stage."""
        return self.placement[:chunk].count(self.placement[chunk])

    def shares(self, num_microbatches: int) -> list[int]:
        """How many of the edge's microbatches each replica that it serves gets; they are dealt round-robin."""
        return [len(range(turn, num_microbatches, self.served)) for turn in range(self.served)]

    @cached_property
    def pipe_pace(self) -> float:
        """The longest turn of a message, on a pipe together with those of all other replicas."""
        over, pipes = self.forwards_over + self.backwards_over, self.forward_pipes + self.backward_pipes
        replicas = self.served * self.edge_dp
        turns = (o if pipe is None else o * replicas for o, pipe in zip(over, pipes, strict=True))
        return max(turns, default=0.0)

    @cached_property
    def heads(self) -> tuple[float, ...]:
        """Per chunk: least time from the start of the step to the start of its first forward."""
        heads = [0.0]
        for hop in range(self.tail):
            heads.append(heads[hop] + self.forward[hop] + self.forwards_over[hop] + self.latency[hop])
        return tuple(heads)

    @cached_property
    def tails(self) -> tuple[float, ...]:
        """Per chunk: least time from the end of its backward to the end of the head's for that microbatch."""
        tails = [0.0]
        for hop in range(self.tail):
            tails.append(tails[hop] + self.backward[hop] + self.backwards_over[hop] + self.latency[hop])
        return tuple(tails)

    @cached_property
    def round_trips(self) -> tuple[float, ...]:
        """Per chunk: least time from the end of its forward to the start of its backward."""
        trips = [0.0]
        for hop in reversed(range(self.tail)):
            crossing = self.forwards_over[hop] + self.backwards_over[hop] + 2 * self.latency[hop]
            trips.insert(0, trips[0] + crossing + self.forward[hop + 1] + self.backward[hop + 1])
        return tuple(trips)

    @property
    def critical_path(self) -> float:
        """The time of a single microbatch without its W."""
        return self.heads[-1] + self.forward[-1] + self.backward[-1] + self.tails[-1]


def _crossings(
    topology: Topology, costs: Costs, direction: Direction
) -> tuple[tuple[float, ...], tuple[Pipe, ...]]:
    """Per hop: how long a message takes on its pipe, and which that is."""
    over = [0.0] * topology.tail
    pipes: list[Pipe] = [None] * topology.tail
    for hop in filter(topology.crosses, range(topology.tail)):
        channel = topology.channel(hop, direction, 0)
        over[hop] = costs.occupancy(hop, direction, up=channel.source.stage < channel.target.stage)
        pipes[hop] = None if topology.is_local(channel) else topology.pipe_of(channel)
    return tuple(over), tuple(pipes)
