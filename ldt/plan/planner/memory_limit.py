"""Memory limits of the planner: how much may be live on each stage, and whether any order can satisfy them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from ldt.errors import PlanError
from ldt.plan.costs import Costs
from ldt.plan.timeline import Timeline
from ldt.topology import Topology

__all__ = ["MemoryLimit"]


@dataclass(frozen=True)
class MemoryLimit:
    """``capacity``: how much the nodes of each stage may hold (None: no limit).

    ``weights``: how much one live microbatch of each chunk counts.
    """

    capacity: tuple[float, ...] | None
    weights: tuple[float, ...]

    @classmethod
    def of(
        cls,
        topology: Topology,
        costs: Costs,
        live: int | Sequence[int] | None,
        size: float | Sequence[float] | None,
    ) -> MemoryLimit:
        """Return the limit of ``live`` microbatches or of ``size`` bytes, each one number or one per stage.

        Raises PlanError if the limit is too small, and names the smallest that works. A microbatch is live in all
        chunks of its node when its backward begins; room for that is enough to run one microbatch at a time.
        """
        chunks = range(topology.num_chunks)
        if live is not None and size is not None:
            raise PlanError("give memory_limit (live microbatches) or memory_limit_bytes, not both")
        if size is None:
            weights = tuple(1.0 for _ in chunks)
            name = "memory_limit"
        else:
            weights = tuple(float(costs.activation(chunk)) for chunk in chunks)
            name = "memory_limit_bytes"
            if not any(weights):
                raise PlanError("memory_limit_bytes needs costs with activation_bytes, which are all 0")
        limit = live if size is None else size
        if limit is None:
            return cls(None, weights)
        capacity = _per_stage(name, limit, topology.num_stages)
        least = tuple(
            sum(weights[chunk] for chunk in topology.chunks_of(stage)) for stage in range(topology.num_stages)
        )
        if any(have < need for have, need in zip(capacity, least, strict=True)):
            smallest = _format([max(least)] if isinstance(limit, Real) else least)
            raise PlanError(
                f"{name}={limit} is too small for one microbatch at a time: the smallest that works is {smallest} "
                "(each chunk of a node keeps one)"
            )
        return cls(capacity, weights)

    def allows(self, timeline: Timeline, costs: Costs) -> bool:
        """Whether the peaks of ``timeline`` are within the limit."""
        if self.capacity is None:
            return True
        by_count = all(weight == 1 for weight in self.weights)
        peaks = timeline.peak_live if by_count else timeline.peak_bytes(costs)
        return all(peak <= self.capacity[node.stage] for node, peak in peaks.items())


def _format(figures: Sequence[float]) -> str:
    text = ", ".join(f"{figure:g}" for figure in figures)
    return f"[{text}]" if len(figures) > 1 else text


def _per_stage(name: str, limit: float | Sequence[float], stages: int) -> tuple[float, ...]:
    numbers = list(limit) if isinstance(limit, Sequence) else [limit] * stages
    if len(numbers) != stages or not all(
        isinstance(n, Real) and not isinstance(n, bool) and n >= 0 for n in numbers
    ):
        raise PlanError(
            f"{name} must be a number from 0 on, or one for each of the {stages} stages, got {limit!r}"
        )
    return tuple(float(number) for number in numbers)
