"""What the list scheduler plays on: nodes, the chunks in their places on them, and the queues of messages between.

The edge is there once, with the chain of each replica that it serves.
"""

from __future__ import annotations

from collections.abc import Mapping

from ldt.plan.action import Kind
from ldt.plan.planner.policy import Rules, Taken
from ldt.plan.planner.replica_costs import Chain

__all__ = ["GridNode", "Place", "Queue", "grid"]


class GridNode:
    """A node: what it may hold, holds and has taken."""

    __slots__ = ("busy", "capacity", "choices", "live", "load", "number", "peak", "stage", "taken")

    def __init__(self, number: int, rules: Rules, stage: int) -> None:
        self.number, self.stage = number, stage
        self.capacity = None if rules.limits.capacity is None else rules.limits.capacity[stage]
        self.choices: list[tuple[Place, Kind]] = []  # the most urgent first
        self.taken: list[Taken] = []
        self.busy = False
        self.live = self.peak = 0
        self.load = 0.0  # of live activations, with the room for one of each chunk

    def take_on(self, rules: Rules, places: Mapping[int, Place]) -> None:
        """Take ``places``, by chunk, as the node's own."""
        self.choices = [(places[chunk], kind) for chunk, kind in rules.priorities[self.stage]]
        self.load = sum(place.size for place in places.values())


class Queue:
    """One channel: its messages' receiver, and how many were made, started, received and used."""

    __slots__ = (
        "arrived", "kind", "latency", "leaving", "link", "occupancy", "place", "ready", "started", "used",
    )  # fmt: skip

    def __init__(self, place: Place, kind: Kind, link: list[float], occupancy: float, latency: float) -> None:
        self.place, self.kind = place, kind  # of its receives
        self.link, self.occupancy, self.latency = link, occupancy, latency
        self.ready = self.started = self.arrived = self.used = 0
        self.leaving = False


class Place:
    """A chunk on a node: its costs, its limits, how far it is, and its queues.

    It has a queue of a kind for each replica whose microbatches it takes in turn: its j-th comes and goes by number
    j % turns. So messages are counted as there (``inputs``, ``gradients``) up to the first that is not.
    """

    __slots__ = (
        "backward", "backwards", "chunk", "down", "ended", "forward", "forwards", "from_above", "from_below",
        "gradients", "inputs", "node", "returned", "size", "strict", "total", "turns", "up", "weight",
        "weights_started", "window",
    )  # fmt: skip

    def __init__(
        self, chain: Chain, rules: Rules, chunk: int, node: GridNode, total: int, turns: int
    ) -> None:
        self.chunk, self.node, self.total, self.turns = chunk, node, total, turns
        self.forward, self.backward = chain.forward[chunk], chain.backward[chunk]  # seconds
        self.weight = 0.0 if chain.weight is None else chain.weight[chunk]
        self.window, self.strict = rules.windows[chunk], rules.strict[chunk]
        self.size = (
            1.0 if rules.limits.weights is None else rules.limits.weights[chunk]
        )  # of a live microbatch
        self.forwards = self.backwards = self.weights_started = 0  # started
        self.inputs, self.gradients = 0 if chunk else total, 0  # there
        self.returned = self.ended = 0  # backwards ended; microbatches of which nothing is live any more
        self.from_below: list[Queue] = []
        self.up: list[Queue] = []
        self.from_above: list[Queue] = []
        self.down: list[Queue] = []

    def count_inputs(self) -> None:
        """Count on after an arrival from below."""
        turns, queues = self.turns, self.from_below
        while queues[self.inputs % turns].arrived > self.inputs // turns:
            self.inputs += 1

    def count_gradients(self) -> None:
        """Count on after an arrival from above."""
        turns, queues = self.turns, self.from_above
        while queues[self.gradients % turns].arrived > self.gradients // turns:
            self.gradients += 1


def grid(chain: Chain, num_microbatches: int, rules: Rules) -> list[GridNode]:
    """The edge, then the stages of the first cloud replica, of the next, and so on; ready to start."""
    nodes = [GridNode(0, rules, stage=0)]
    edge = {
        chunk: Place(chain, rules, chunk, nodes[0], num_microbatches, chain.served)
        for chunk in chain.chunks_of(0)
    }
    nodes[0].take_on(rules, edge)
    for share in chain.shares(num_microbatches):
        places = dict(edge)
        for stage in range(1, chain.num_stages):
            node = GridNode(len(nodes), rules, stage)
            own = {
                chunk: Place(chain, rules, chunk, node, share, turns=1) for chunk in chain.chunks_of(stage)
            }
            node.take_on(rules, own)
            nodes.append(node)
            places |= own
        _connect(chain, places)
    return nodes


def _connect(chain: Chain, places: Mapping[int, Place]) -> None:
    """Add the channels of one replica of the cloud, whose ``places`` are by chunk."""
    links: dict[tuple[int, int], list[float]] = {}
    for hop, (occupancy, latency) in enumerate(zip(chain.occupancy, chain.latency, strict=True)):
        below, above = places[hop], places[hop + 1]
        to, back = (
            links.setdefault(ends, [0.0])
            for ends in (
                (below.node.number, above.node.number),
                (above.node.number, below.node.number),
            )
        )
        up = Queue(above, Kind.RECV_F, to, occupancy, latency)
        down = Queue(below, Kind.RECV_B, back, occupancy, latency)
        below.up.append(up)
        above.from_below.append(up)
        above.down.append(down)
        below.from_above.append(down)
