"""The costs of a step: compute seconds per chunk, latency, bandwidth and bytes per hop, speed per node."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from ldt.errors import PlanError, TopologyError
from ldt.plan.action import Action, Kind
from ldt.plan.files import load, read_json
from ldt.topology import Direction, Node, Topology, listed

__all__ = ["UNIT_COSTS", "Costs"]

PerItem = float | Sequence[float]  # one number for all, or one per chunk (or hop, or stage)
PerDirection = PerItem | Mapping[str, PerItem]

_FORMAT = "ldt costs 1"
_PER_CHUNK = ("forward", "backward", "weight", "input", "activation_bytes")
_PER_HOP = ("latency", "jitter", "bandwidth", "bytes")
_SMALLEST, _LARGEST = 1e-15, 1e18  # beyond these, sums and quotients could overflow
_ABOVE_ZERO = ("bandwidth", "speed")
_DIRECTIONS = {"bandwidth": ("up", "down"), "bytes": ("forward", "backward")}


@dataclass(frozen=True)
class Costs:
    """Times in seconds, bandwidth in bytes per second, sizes in bytes. Each is one number or a sequence.

    Per chunk: ``forward``, ``backward``, the two parts of a split backward, ``weight`` (W; default: half of
    ``backward``) and ``input`` (I; default: ``backward`` minus W), and ``activation_bytes``, which a chunk keeps for
    one microbatch from its forward to the end of its backward.

    Per hop c -> c+1: ``latency`` (one way), ``bandwidth`` (per direction; None: unlimited) and ``bytes`` (of one
    message). Directions may differ: ``bandwidth={"up": ..., "down": ...}``, where up is to a stage of a greater
    number, as from the edge to the cloud, and ``bytes={"forward": ..., "backward": ...}``, activations and gradients.
    Messages that share a pipe (``Topology.pipe_of``) take turns on it. ``jitter``: seconds by which a message may come
    later, as when a packet was lost and is sent again. ``optimize`` leaves room for it, ``simulate`` does without.

    ``speed`` divides a node's compute times: one number, one per stage, or a mapping from nodes (``Node`` or
    "stage.replica") to the speeds that are not 1.
    """

    forward: PerItem
    backward: PerItem
    weight: PerItem | None = None
    latency: PerItem = 0.0
    bandwidth: PerDirection | None = None
    bytes: PerDirection = 0
    input: PerItem | None = None
    speed: PerItem | Mapping[Node, float] = 1.0
    activation_bytes: PerItem = 0
    jitter: PerItem = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _frozen(field.name, getattr(self, field.name)))

    def __hash__(self) -> int:
        figures = (getattr(self, field.name) for field in fields(self))
        return hash(tuple(frozenset(f.items()) if isinstance(f, Mapping) else f for f in figures))

    def check(self, topology: Topology) -> None:
        """Raise PlanError if a figure is negative or a sequence does not have one entry per chunk, hop or stage."""
        for name in _PER_CHUNK:
            _check(name, getattr(self, name), topology.num_chunks, "chunk")
        for name in _PER_HOP:
            for figure in _by_direction(getattr(self, name)):
                _check(name, figure, topology.num_chunks - 1, "hop")
        if isinstance(self.speed, Mapping):
            unknown = sorted(self.speed.keys() - set(topology.nodes))
            if unknown:
                raise PlanError(
                    f"costs: speed has node {unknown[0]}, but the nodes are {listed(topology.nodes)}"
                )
            _check("speed", list(self.speed.values()), len(self.speed), "node")
        else:
            _check("speed", self.speed, topology.num_stages, "stage")
        self._check_split(topology)

    def _check_split(self, topology: Topology) -> None:
        if self.weight is None or self.input is not None:
            return
        for chunk in range(topology.num_chunks):
            backward, weight = _pick(self.backward, chunk), _pick(self.weight, chunk)
            if weight > backward:
                raise PlanError(
                    f"costs: weight is a part of backward, got weight={weight}, backward={backward} for chunk "
                    f"{chunk}: give input as well if a split backward costs more than a whole one"
                )

    def compute(self, action: Action, node: Node | None = None) -> float:
        """Seconds that a compute action takes on ``node`` (None: at speed 1). 0 for other kinds."""
        speed = 1.0 if node is None else self.speed_of(node)
        if action.kind is Kind.F:
            return _pick(self.forward, action.chunk) / speed
        if not action.kind.is_compute:
            return 0.0
        backward = _pick(self.backward, action.chunk)
        if action.kind is Kind.B:
            return backward / speed
        weight = backward / 2 if self.weight is None else _pick(self.weight, action.chunk)
        if action.kind is Kind.W:
            return weight / speed
        return (backward - weight if self.input is None else _pick(self.input, action.chunk)) / speed

    def speed_of(self, node: Node) -> float:
        """The speed of ``node`` relative to the compute times."""
        if isinstance(self.speed, Mapping):
            return self.speed.get(node, 1.0)
        return _pick(self.speed, node.stage)

    def delay(self, hop: int) -> float:
        """Seconds from sending the last byte to the arrival of the message."""
        return _pick(self.latency, hop)

    def with_every_message_late(self, topology: Topology) -> Costs:
        """These costs if all messages came as late as ``jitter`` says."""
        jitters = [_pick(self.jitter, hop) for hop in range(topology.tail)]
        if not any(jitters):
            return self
        late = [self.delay(hop) + jitter for hop, jitter in enumerate(jitters)]
        return replace(self, latency=late, jitter=0.0)

    def occupancy(self, hop: int, direction: Direction = "F", up: bool = True) -> float:
        """Seconds for which one message of ``hop`` and ``direction``, sent ``up`` or down, occupies its pipe."""
        if self.bandwidth is None:
            return 0.0
        size = _of_direction(self.bytes, "forward" if direction == "F" else "backward")
        return _pick(size, hop) / _pick(_of_direction(self.bandwidth, "up" if up else "down"), hop)

    def activation(self, chunk: int) -> float:
        """Bytes that ``chunk`` keeps for one microbatch."""
        return _pick(self.activation_bytes, chunk)

    @classmethod
    def measure(cls, pipeline: Any, microbatches: Any = None, steps: int = 3) -> Costs:
        """Measure the costs of a pipeline on its mesh. Every rank calls it: see ``ldt.Pipeline.measure_costs``."""
        costs: Costs = pipeline.measure_costs(microbatches, steps)
        return costs

    # -- files -----------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return JSON text that ``from_json`` reads back into equal costs."""
        data = asdict(self)
        if isinstance(self.speed, Mapping):
            data["speed"] = {str(node): speed for node, speed in self.speed.items()}
        return json.dumps({"format": _FORMAT, **data}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read the text of ``to_json``; figures with a default may be missing. Raises PlanError for anything else."""
        figures = vars(read_json(text, _File, f'a file of costs, "format": "{_FORMAT}"'))
        costs = cls(**{name: figure for name, figure in figures.items() if name != "format"})
        for name in figures.keys() - {"format"}:
            for figure in _by_direction(getattr(costs, name)):
                _check_values(name, figure)
        return costs

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        """Read a file of ``save``. Raises PlanError naming the file if it does not hold costs."""
        return load(path, cls.from_json)


@dataclass(frozen=True)
class _File:
    """The fields of Costs as ``to_json`` writes them."""

    format: Literal["ldt costs 1"]
    forward: float | list[float]
    backward: float | list[float]
    weight: float | list[float] | None = None
    latency: float | list[float] = 0.0
    bandwidth: float | list[float] | dict[str, float | list[float]] | None = None
    bytes: float | list[float] | dict[str, float | list[float]] = 0
    input: float | list[float] | None = None
    speed: float | list[float] | dict[str, float] = 1.0
    activation_bytes: float | list[float] = 0
    jitter: float | list[float] = 0.0


def _pick(figure: PerItem, index: int) -> float:
    return figure[index] if isinstance(figure, tuple) else figure  # type: ignore[return-value]


def _by_direction(figure: Any) -> Sequence[Any]:
    """The figures in a mapping, else the figure itself."""
    return list(figure.values()) if isinstance(figure, Mapping) else [figure]


def _of_direction(figure: PerDirection, name: str) -> PerItem:
    return figure[name] if isinstance(figure, Mapping) else figure


def _frozen(name: str, figure: Any) -> Any:
    """Return ``figure`` as an immutable value: a number, a tuple, or a dict by node or direction."""
    if figure is None and name in ("weight", "input", "bandwidth"):
        return None
    if name == "speed" and isinstance(figure, Mapping):
        return {_node(node): _number(name, speed) for node, speed in figure.items()}
    if name in _DIRECTIONS and isinstance(figure, Mapping):
        one, other = _DIRECTIONS[name]
        if set(figure) != {one, other}:
            raise PlanError(
                f"costs: {name} by direction needs {one!r} and {other!r}, got {', '.join(map(repr, figure))[:80]}"
            )
        return {one: _numbers(name, figure[one]), other: _numbers(name, figure[other])}
    return _numbers(name, figure)


def _numbers(name: str, figure: Any) -> Any:
    if isinstance(figure, Sequence) and not isinstance(figure, str):
        return tuple(_number(name, value) for value in figure)
    return _number(name, figure)


def _number(name: str, value: Any) -> Any:
    if isinstance(value, Real) and not isinstance(value, bool):
        return value if isinstance(value, int) else float(value)
    raise PlanError(f"costs: {name} must be a number or a sequence of numbers, got {value!r}")


def _node(node: Any) -> Node:
    try:
        return Node.parse(node) if isinstance(node, str) else Node(*node)
    except (TopologyError, TypeError) as error:
        raise PlanError(f"costs: speed is by node, for example {{'1.0': 0.5}}, got {node!r}") from error


def _check(name: str, figure: PerItem | None, expected: int, item: str) -> None:
    if isinstance(figure, Sequence) and len(figure) != expected:
        raise PlanError(
            f"costs: {name} needs one number for each of the {expected} {item}s, got {len(figure)}"
        )
    _check_values(name, figure)


def _check_values(name: str, figure: PerItem | None) -> None:
    figures = figure if isinstance(figure, Sequence) else [] if figure is None else [figure]
    for value in figures:
        if not 0 <= value < float("inf") or (name in _ABOVE_ZERO and value == 0):
            least = "above" if name in _ABOVE_ZERO else "at least"
            raise PlanError(f"costs: {name} must be {least} 0 and finite, got {value}")
        if value > _LARGEST or (name in _ABOVE_ZERO and value < _SMALLEST):
            raise PlanError(
                f"costs: {name} is out of range, got {str(value)[:40]}: use seconds, bytes and bytes per second of "
                f"at most {_LARGEST:g}, and a bandwidth and a speed of at least {_SMALLEST:g}"
            )


UNIT_COSTS = Costs(forward=1.0, backward=2.0)
