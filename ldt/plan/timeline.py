"""Timelines of a step, planned by the simulator or measured by the runtime."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ldt.errors import LdtError, PlanError
from ldt.plan.action import Action, Kind
from ldt.plan.costs import Costs
from ldt.plan.files import load, read_json
from ldt.plan.levels import peak_level
from ldt.topology import Channel, Node, Topology

__all__ = ["Event", "Timeline"]

_FORMAT = "ldt timeline 1"


class Event(NamedTuple):
    """An action of ``node`` with its times in seconds. A transfer has the action of its send, and a channel."""

    node: Node
    action: Action
    start: float
    end: float
    channel: Channel | None = None


@dataclass(frozen=True)
class Timeline:
    """Compute events and transfers of one step, by start time. The clock's zero is arbitrary."""

    topology: Topology
    events: tuple[Event, ...]

    @classmethod
    def of(cls, topology: Topology, events: Iterable[Event]) -> Timeline:
        """Return a timeline of ``events``, given in any order."""
        return cls(topology, tuple(sorted(events, key=_when)))

    @classmethod
    def from_records(
        cls, topology: Topology, records: Iterable[tuple[Node, Action, float, float]]
    ) -> Timeline:
        """Return a measured timeline from the (node, action, start, end) of executed actions, on one clock.

        ``records`` may be those of all nodes or of some. A compute action starts when it begins to compute, after any
        wait for its input. A transfer lasts from the start of its send to the end of its receive; it is left out if
        only one of the two was recorded.
        """
        events: list[Event] = []
        sends: dict[object, tuple[Node, Action, float, Channel]] = {}
        arrivals: dict[object, float] = {}
        for node, action, start, end in records:
            if action.kind.is_comm and action.microbatch is not None:
                replica = topology.cloud_replica(node, action.microbatch)
                channel = topology.channel(action.hop, action.kind.direction, replica)
                if action.kind.is_send:
                    sends[channel, action.microbatch] = (node, action, start, channel)
                else:
                    arrivals[channel, action.microbatch] = end
            else:
                events.append(Event(node, action, start, end))
        for message, (node, action, start, channel) in sends.items():
            if message in arrivals:
                events.append(Event(node, action, start, max(start, arrivals[message]), channel))
        return cls.of(topology, events)

    # -- figures ---------------------------------------------------------------------------------------------

    @cached_property
    def compute(self) -> tuple[Event, ...]:
        """The events of forwards and backwards."""
        return tuple(event for event in self.events if event.action.kind.is_compute)

    @cached_property
    def transfers(self) -> tuple[Event, ...]:
        """The events of messages between nodes."""
        return tuple(event for event in self.events if event.channel is not None)

    @property
    def start(self) -> float:
        return min((event.start for event in self.events), default=0.0)

    @property
    def end(self) -> float:
        return max((event.end for event in self.events), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end - self.start

    @cached_property
    def busy(self) -> dict[Node, float]:
        """Seconds that each node computed."""
        busy = dict.fromkeys(self.topology.nodes, 0.0)
        for event in self.compute:
            busy[event.node] += event.end - event.start
        return busy

    @property
    def bubble(self) -> float:
        """The share of the makespan in which a node did not compute, averaged over the nodes; 0 to 1."""
        if self.makespan <= 0:
            return 0.0
        return 1 - sum(self.busy.values()) / (self.makespan * len(self.busy))

    @property
    def busy_share(self) -> dict[Node, float]:
        """The share of the makespan that each node computed; 0 to 1."""
        return {node: busy / self.makespan if self.makespan > 0 else 0.0 for node, busy in self.busy.items()}

    @cached_property
    def peak_live(self) -> dict[Node, int]:
        """The maximum number of activations that each node kept, one per chunk and microbatch.

        In training an activation lives from the start of its forward to the end of its backward (of its W if the
        backward is split). In a forward-only timeline it lives until it was sent, or until the next chunk's forward
        ended if that chunk is on the same node.
        """
        return {node: int(level) for node, level in self._peaks(lambda chunk: 1).items()}

    def peak_bytes(self, costs: Costs) -> dict[Node, float]:
        """The maximum bytes of activations that each node kept, by ``costs.activation_bytes``.

        Receive buffers are not included: ``buffers_needed(plan)`` messages of ``costs.bytes``.
        """
        costs.check(self.topology)
        return self._peaks(costs.activation)

    def _peaks(self, size: Callable[[int], float]) -> dict[Node, float]:
        training = any(event.action.kind is not Kind.F for event in self.compute)
        ends = self._ends_of_backward() if training else self._ends_of_use()
        changes: dict[Node, list[tuple[float, float]]] = defaultdict(list)
        last = self.end
        for event in self.compute:
            if event.action.kind is Kind.F:
                key = (event.node, event.action.chunk, event.action.microbatch)
                end = ends.get(key, last if training else event.end)
                weight = size(event.action.chunk)
                changes[event.node] += [(event.start, weight), (end, -weight)]
        return {node: peak_level(changes[node]) for node in self.topology.nodes}

    def _ends_of_backward(self) -> dict[object, float]:
        last = (Kind.B, Kind.W)
        return {
            (e.node, e.action.chunk, e.action.microbatch): e.end
            for e in self.compute
            if e.action.kind in last
        }

    def _ends_of_use(self) -> dict[object, float]:
        used: dict[object, float] = {
            (e.node, e.action.chunk - 1, e.action.microbatch): e.end for e in self.compute
        }
        used.update({(e.node, e.action.chunk, e.action.microbatch): e.end for e in self.transfers})
        return used

    # -- files -----------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return JSON text that ``from_json`` reads back into an equal timeline."""
        events = [
            [str(e.node), str(e.action), e.start, e.end, None if e.channel is None else e.channel.replica]
            for e in self.events
        ]
        return json.dumps({"format": _FORMAT, "topology": self.topology.to_text(), "events": events})

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read what ``to_json`` writes. Raises PlanError for anything else."""
        found = read_json(text, _File, "a timeline")
        try:
            topology = Topology.from_text(found.topology)
            return cls(topology, tuple(_read_event(topology, *event) for event in found.events))
        except LdtError as error:
            raise PlanError(f"this is not a timeline: {error}") from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read a file of ``save``. Raises PlanError naming the file if it holds no timeline."""
        return load(path, cls.from_json)


@dataclass(frozen=True)
class _File:
    """The JSON that ``to_json`` writes. An event is node, action, start, end and, for a transfer, its replica."""

    format: Literal["ldt timeline 1"]
    topology: str
    events: list[tuple[str, str, float, float, int | None]]


def _when(event: Event) -> tuple[Any, ...]:
    return event.start, event.end, event.node, str(event.action)


def _read_event(
    topology: Topology, node: str, action: str, start: float, end: float, replica: int | None
) -> Event:
    parsed, owner = Action.parse(action), Node.parse(node)
    if topology.stage_of(parsed.chunk) != owner.stage or owner.replica >= topology.replicas(owner.stage):
        raise PlanError(f"node {node} has no chunk {parsed.chunk} in {topology.to_text()}")
    if end < start or parsed.kind.is_send != (replica is not None) or parsed.kind.is_receive:
        raise PlanError(f"expected a compute action, or a send with its replica, and its times, got {action}")
    channel = None if replica is None else topology.channel(parsed.hop, parsed.kind.direction, replica)
    return Event(owner, parsed, start, end, channel)
