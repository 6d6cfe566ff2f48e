"""What a step costs: compute seconds per chunk, latency, bandwidth and bytes per hop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ldt.errors import PlanError
from ldt.plan.action import Action, Kind
from ldt.topology import Topology

__all__ = ["UNIT_COSTS", "Costs"]

PerItem = float | Sequence[float]  # one for all, or one per chunk (or hop)


@dataclass(frozen=True)
class Costs:
    """Times in seconds, bandwidth in bytes per second, sizes in bytes. Each is one number or a sequence.

    ``forward``, ``backward`` and ``weight`` are per chunk; ``weight`` (the W part of a backward that is split
    into I and W) defaults to half of ``backward``. ``latency`` (one way), ``bandwidth`` (per direction; None:
    unlimited) and ``bytes`` (of one message) are per hop c -> c+1.
    """

    forward: PerItem
    backward: PerItem
    weight: PerItem | None = None
    latency: PerItem = 0.0
    bandwidth: PerItem | None = None
    bytes: PerItem = 0

    def check(self, topology: Topology) -> None:
        """Raise PlanError if a figure is negative or a sequence has not one entry per chunk (or hop)."""
        chunks, hops = topology.num_chunks, topology.num_chunks - 1
        for name, expected in (("forward", chunks), ("backward", chunks), ("weight", chunks)):
            _check(name, getattr(self, name), expected, "chunk")
        for name, expected in (("latency", hops), ("bandwidth", hops), ("bytes", hops)):
            _check(name, getattr(self, name), expected, "hop")

    def compute(self, action: Action) -> float:
        """Seconds that a compute action takes; other kinds take none."""
        if action.kind is Kind.F:
            return _pick(self.forward, action.chunk)
        if not action.kind.is_compute:
            return 0.0
        backward = _pick(self.backward, action.chunk)
        if action.kind is Kind.B:
            return backward
        weight = backward / 2 if self.weight is None else _pick(self.weight, action.chunk)
        return weight if action.kind is Kind.W else backward - weight

    def delay(self, hop: int) -> float:
        """Seconds between the last byte leaving and the message being there."""
        return _pick(self.latency, hop)

    def occupancy(self, hop: int) -> float:
        """Seconds for which one message keeps its direction of the link to itself."""
        return 0.0 if self.bandwidth is None else _pick(self.bytes, hop) / _pick(self.bandwidth, hop)


UNIT_COSTS = Costs(forward=1.0, backward=2.0)


def _pick(figure: PerItem, index: int) -> float:
    return figure[index] if isinstance(figure, Sequence) else figure


def _check(name: str, figure: PerItem | None, expected: int, item: str) -> None:
    if isinstance(figure, Sequence) and len(figure) != expected:
        raise PlanError(
            f"costs: {name} needs one number for each of the {expected} {item}s, got {len(figure)}"
        )
    figures = figure if isinstance(figure, Sequence) else [] if figure is None else [figure]
    for value in figures:
        if not value >= 0 or (name == "bandwidth" and value == 0):
            raise PlanError(
                f"costs: {name} must be {'above' if name == 'bandwidth' else 'at least'} 0, got {value}"
            )
