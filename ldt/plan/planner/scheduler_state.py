"""The state of the list scheduler: nodes, their chunks, and the queues of messages between chunks.

There is one edge, which is connected to every replica that it serves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ldt.plan.action import Kind
from ldt.plan.planner.policy import Policy, Scheduled
from ldt.plan.planner.replica_costs import ReplicaCosts
from ldt.plan.sim.link import Link

__all__ = ["ChunkState", "NodeState", "Queue", "scheduler_state"]


class NodeState:
    """A node: its capacity, its load and the actions it has run."""

    __slots__ = ("busy", "capacity", "choices", "live", "load", "number", "peak", "scheduled", "stage")

    def __init__(self, number: int, policy: Policy, stage: int) -> None:
        self.number, self.stage = number, stage
        self.capacity = None if policy.limits.capacity is None else policy.limits.capacity[stage]
        self.choices: list[tuple[ChunkState, Kind]] = []  # the most urgent first
        self.scheduled: list[Scheduled] = []
        self.busy = False
        self.live = self.peak = 0
        self.load = 0.0  # live activations, including the room reserved for one of each chunk

    def add_chunks(self, policy: Policy, states: Mapping[int, ChunkState]) -> None:
        """Add the chunks of the node."""
        self.choices = [(states[chunk], kind) for chunk, kind in policy.priorities[self.stage]]
        self.load = sum(state.size for state in states.values())


class Queue:
    """One channel: its receiver, and how many messages are ready, started, received and used."""

    __slots__ = (
        "arrived", "kind", "latency", "leaving", "link", "occupancy", "ready", "receiver", "started", "used",
    )  # fmt: skip

    def __init__(
        self, receiver: ChunkState, kind: Kind, link: Link, occupancy: float, latency: float
    ) -> None:
        self.receiver, self.kind = receiver, kind  # of its receives
        self.link, self.occupancy, self.latency = link, occupancy, latency
        self.ready = self.started = self.arrived = self.used = 0
        self.leaving = False


class ChunkState:
    """A chunk on a node: its costs, limits, progress and queues.

    It has one queue per kind for each replica whose microbatches it takes in turn; its j-th microbatch uses queue
    j % turns. ``inputs`` and ``gradients`` count the messages received up to the first missing one.
    """

    __slots__ = (
        "backward", "backwards", "chunk", "down", "ended", "forward", "forwards", "from_above", "from_below",
        "gradients", "inputs", "node", "returned", "size", "strict", "total", "turns", "up", "weight",
        "weights_started", "window",
    )  # fmt: skip

    def __init__(
        self, costs: ReplicaCosts, policy: Policy, chunk: int, node: NodeState, total: int, turns: int
    ) -> None:
        self.chunk, self.node, self.total, self.turns = chunk, node, total, turns
        self.forward, self.backward = costs.forward[chunk], costs.backward[chunk]  # seconds
        self.weight = 0.0 if costs.weight is None else costs.weight[chunk]
        self.window, self.strict = policy.windows[chunk], policy.strict[chunk]
        self.size = (
            1.0 if policy.limits.weights is None else policy.limits.weights[chunk]
        )  # of a live microbatch
        self.forwards = self.backwards = self.weights_started = 0  # started
        self.inputs, self.gradients = 0 if chunk else total, 0  # received
        self.returned = self.ended = 0  # backwards ended; microbatches with nothing live any more
        self.from_below: list[Queue] = []
        self.up: list[Queue] = []
        self.from_above: list[Queue] = []
        self.down: list[Queue] = []

    def count_inputs(self) -> None:
        """Update ``inputs`` after a message from the previous chunk."""
        turns, queues = self.turns, self.from_below
        while queues[self.inputs % turns].arrived > self.inputs // turns:
            self.inputs += 1

    def count_gradients(self) -> None:
        """Update ``gradients`` after a message from the next chunk."""
        turns, queues = self.turns, self.from_above
        while queues[self.gradients % turns].arrived > self.gradients // turns:
            self.gradients += 1


def scheduler_state(costs: ReplicaCosts, num_microbatches: int, policy: Policy) -> list[NodeState]:
    """The initial state: the edge, then the stages of the first cloud replica, of the next, and so on."""
    nodes = [NodeState(0, policy, stage=0)]
    edge = {
        chunk: ChunkState(costs, policy, chunk, nodes[0], num_microbatches, costs.served)
        for chunk in costs.chunks_of(0)
    }
    nodes[0].add_chunks(policy, edge)
    links: dict[object, Link] = defaultdict(Link)
    for share in costs.shares(num_microbatches):
        states = dict(edge)
        for stage in range(1, costs.num_stages):
            node = NodeState(len(nodes), policy, stage)
            own = {
                chunk: ChunkState(costs, policy, chunk, node, share, turns=1)
                for chunk in costs.chunks_of(stage)
            }
            node.add_chunks(policy, own)
            nodes.append(node)
            states |= own
        _connect(costs, states, links)
    return nodes


def _connect(costs: ReplicaCosts, states: Mapping[int, ChunkState], links: dict[object, Link]) -> None:
    """Add the channels of one cloud replica. ``states`` are by chunk, ``links`` by pipe or by node numbers.

    All edges send alike, so on a pipe each message is one of ``edge_dp`` and waits for the others.
    """
    for hop, latency in enumerate(costs.latency):
        below, above = states[hop], states[hop + 1]
        queues = []
        for source, target, kind, occupancy, pipe in (
            (below, above, Kind.RECV_F, costs.forwards_over[hop], costs.forward_pipes[hop]),
            (above, below, Kind.RECV_B, costs.backwards_over[hop], costs.backward_pipes[hop]),
        ):
            link = links[pipe or (source.node.number, target.node.number)]
            turns = 1 if pipe is None else costs.edge_dp
            queues.append(Queue(target, kind, link, occupancy * turns, latency))
        up, down = queues
        below.up.append(up)
        above.from_below.append(up)
        above.down.append(down)
        below.from_above.append(down)
