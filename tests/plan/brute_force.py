"""An independent verifier of plans: runs them action by action with plain lists and without time.

It shares no code with ldt.plan's engine or verifier. The rules of the game are monotone (a possible move stays possible
until it is made), so making any possible move until none is left decides whether a plan works.
"""

from __future__ import annotations

from collections import defaultdict

from ldt.plan import Action, Kind, Plan
from ldt.topology import Node, lanes

Slot = tuple[int, str, int | None]  # chunk, "F" or "B", microbatch


def works(plan: Plan, policy: str) -> bool:
    """Whether every row of ``plan``, which has communication, can be played to its end."""
    return _Game(plan, policy).play()


class _Game:
    def __init__(self, plan: Plan, policy: str) -> None:
        self.plan = plan
        self.lane = {(c.source, c.target, c.hop): lane for c, lane in lanes(plan.topology, policy).items()}
        self.place = dict.fromkeys(plan.rows, 0)
        self.sends: dict[object, list[tuple[int, Action, Action]]] = defaultdict(list)
        self.receives: dict[object, list[tuple[int, Action, Action]]] = defaultdict(list)
        self.done: set[tuple[Node, Action]] = set()
        self.inputs: set[tuple[Node, Slot]] = set()

    def _replica(self, node: Node, microbatch: int | None) -> int:
        """Return the cloud replica of a node's microbatch: an edge replica serves its cloud replicas in turn."""
        dp, edge_dp = self.plan.topology.dp, self.plan.topology.edge_dp
        return node.replica if node.stage else node.replica + (microbatch or 0) * edge_dp % dp

    def _node(self, chunk: int, replica: int) -> Node:
        stage = self.plan.topology.placement[chunk]
        return Node(stage, replica if stage else replica % self.plan.topology.edge_dp)

    def _backwards(self, node: Node, chunk: int) -> list[Action]:
        """Return the node's backwards of a chunk."""
        edge = Node(0, node.replica % self.plan.topology.edge_dp)
        return [
            Action(chunk, Kind.B, m)
            for m in range(self.plan.num_microbatches)
            if node.stage == 0 or self._replica(edge, m) == node.replica
        ]

    def play(self) -> bool:
        while self._move_rows() or self._move_reductions() or self._move_messages():
            pass
        ended = all(place == len(self.plan.rows[node]) for node, place in self.place.items())
        return ended and not any(self.sends.values()) and not any(self.receives.values())

    def _next(self, node: Node) -> Action | None:
        row, place = self.plan.rows[node], self.place[node]
        return row[place] if place < len(row) else None

    def _move_rows(self) -> bool:
        moved = False
        for node in self.plan.rows:
            while (action := self._next(node)) is not None and self._possible(node, action):
                self.place[node] += 1
                moved = True
        return moved

    def _move_reductions(self) -> bool:
        """All replicas of a stage make the move together, once each has finished the chunk's backwards."""
        for stage in range(self.plan.topology.num_stages):
            nodes = [node for node in self.plan.rows if node.stage == stage]
            chunk, kind, _ = self._next(nodes[0]) or Action(0, Kind.F)
            if (
                kind is Kind.REDUCE_GRAD
                and all(self._next(node) == Action(chunk, kind) for node in nodes)
                and all((n, backward) in self.done for n in nodes for backward in self._backwards(n, chunk))
            ):
                for node in nodes:
                    self.place[node] += 1
                return True
        return False

    def _possible(self, node: Node, action: Action) -> bool:
        (chunk, kind, microbatch), replica = action, self._replica(node, action.microbatch)
        tail = self.plan.topology.num_chunks - 1
        if kind is Kind.REDUCE_GRAD:
            return False
        if kind in (Kind.SEND_F, Kind.SEND_B):
            made_by = Kind.F if kind is Kind.SEND_F else Kind.B
            if (node, Action(chunk, made_by, microbatch)) not in self.done:
                return False
            other = chunk + 1 if kind is Kind.SEND_F else chunk - 1
            receive = Action(other, Kind.RECV_F if kind is Kind.SEND_F else Kind.RECV_B, microbatch)
            lane = self.lane[node, self._node(other, replica), min(chunk, other)]
            self.sends[lane, node].append((replica, action, receive))
        elif kind in (Kind.RECV_F, Kind.RECV_B):
            other = chunk - 1 if kind is Kind.RECV_F else chunk + 1
            send = Action(other, Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B, microbatch)
            lane = self.lane[self._node(other, replica), node, min(chunk, other)]
            self.receives[lane, node].append((replica, send, action))
        elif kind is Kind.F:
            if chunk > 0 and not self._has_input(node, chunk, chunk - 1, "F", microbatch):
                return False
            self.done.add((node, action))
        else:
            if (node, Action(chunk, Kind.F, microbatch)) not in self.done:
                return False
            if chunk < tail and not self._has_input(node, chunk, chunk + 1, "B", microbatch):
                return False
            self.done.add((node, action))
        return True

    def _has_input(self, node: Node, chunk: int, source: int, direction: str, microbatch: int | None) -> bool:
        if self.plan.topology.placement[chunk] == self.plan.topology.placement[source]:
            return (node, Action(source, Kind(direction), microbatch)) in self.done
        return (node, (chunk, direction, microbatch)) in self.inputs

    def _move_messages(self) -> bool:
        for sends in self.sends.values():
            for receives in self.receives.values():
                if sends and receives and sends[0] == receives[0]:
                    replica, _, receive = sends.pop(0)
                    receives.pop(0)
                    direction = "F" if receive.kind is Kind.RECV_F else "B"
                    node = self._node(receive.chunk, replica)
                    self.inputs.add((node, (receive.chunk, direction, receive.microbatch)))
                    return True
        return False
