"""The costs of one replica as plain numbers per chunk and hop, for the bound and the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ldt.plan.action import Action, Kind
from ldt.plan.costs import Costs
from ldt.topology import Topology

__all__ = ["ReplicaCosts"]


@dataclass(frozen=True)
class ReplicaCosts:
    """Seconds per chunk and per hop of one replica, already divided by the nodes' speeds.

    ``backward`` is the part that the previous chunk waits for: all of it, or the input gradient if the backward
    is split. ``weight`` is then the other part, otherwise None. Hop c -> c+1 keeps its direction of the link from
    stage c % P busy for ``occupancy[c]`` and takes ``latency[c]`` more; both are 0 where P = 1.
    ``served`` such replicas share the edge.
    """

    num_stages: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...] | None
    occupancy: tuple[float, ...]
    latency: tuple[float, ...]
    served: int = 1

    @classmethod
    def of(cls, topology: Topology, costs: Costs, replica: int = 0, split: bool = False) -> ReplicaCosts:
        """The costs of ``replica``. ``split``: backwards run as I and W."""
        nodes = [topology.node_at(chunk, replica) for chunk in range(topology.num_chunks)]
        forward, backward, weights = (
            tuple(costs.compute(Action(chunk, kind, 0), node) for chunk, node in enumerate(nodes))
            for kind in (Kind.F, Kind.I if split else Kind.B, Kind.W)
        )
        hops = range(topology.tail)
        occupancy, latency = (
            tuple(figure(hop) if topology.crosses(hop) else 0.0 for hop in hops)
            for figure in (costs.occupancy, costs.delay)
        )
        weight = weights if split else None
        return cls(topology.num_stages, forward, backward, weight, occupancy, latency, topology.served)

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

    def chunks_of(self, stage: int) -> range:
        """The chunks of ``stage`` in model order."""
        return range(stage, self.num_chunks, self.num_stages)

    def shares(self, num_microbatches: int) -> list[int]:
        """How many of the edge's microbatches each replica that it serves gets; they are dealt round-robin."""
        return [len(range(turn, num_microbatches, self.served)) for turn in range(self.served)]

    def delay(self, hop: int) -> float:
        """Least seconds from the end of a chunk to the start of the next one across the hop."""
        return self.occupancy[hop] + self.latency[hop]

    @cached_property
    def heads(self) -> tuple[float, ...]:
        """Per chunk: least time from the start of the step to the start of its first forward."""
        heads = [0.0]
        for hop in range(self.tail):
            heads.append(heads[hop] + self.forward[hop] + self.delay(hop))
        return tuple(heads)

    @cached_property
    def tails(self) -> tuple[float, ...]:
        """Per chunk: least time from the end of its backward to the end of the head's for that microbatch."""
        tails = [0.0]
        for hop in range(self.tail):
            tails.append(tails[hop] + self.backward[hop] + self.delay(hop))
        return tuple(tails)

    @cached_property
    def round_trips(self) -> tuple[float, ...]:
        """Per chunk: least time from the end of its forward to the start of its backward."""
        trips = [0.0]
        for hop in reversed(range(self.tail)):
            trips.insert(0, trips[0] + 2 * self.delay(hop) + self.forward[hop + 1] + self.backward[hop + 1])
        return tuple(trips)

    @property
    def critical_path(self) -> float:
        """The time of a single microbatch without its W."""
        return self.heads[-1] + self.forward[-1] + self.backward[-1] + self.tails[-1]
