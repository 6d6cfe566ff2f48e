"""A second, independent judge of plans: plays them action by action with plain lists, and knows no time.

It shares no code with ldt.plan's engine or verifier. The rules of play are monotone (a move that is possible stays
possible until it is made), so making any possible move until none is left decides whether a plan works.
"""

from __future__ import annotations

from collections import defaultdict

from ldt.plan import Action, Kind, Plan
from ldt.topology import lanes

Slot = tuple[int, str, int | None]  # chunk, "F" or "B", microbatch


def works(plan: Plan, policy: str) -> bool:
    """True if every row of ``plan``, which has communication and one replica, can be played to its end."""
    return _Game(plan, policy).play()


class _Game:
    def __init__(self, plan: Plan, policy: str) -> None:
        self.plan = plan
        lane_of = lanes(plan.topology, policy)
        self.lane = {(c.source.stage, c.target.stage, c.hop): lane_of[c] for c in plan.topology.channels}
        self.place = dict.fromkeys(plan.rows, 0)
        self.sends: dict[object, list[tuple[Action, Action]]] = defaultdict(list)
        self.receives: dict[object, list[tuple[Action, Action]]] = defaultdict(list)
        self.done: set[Action] = set()
        self.inputs: set[Slot] = set()

    def play(self) -> bool:
        while self._move_rows() or self._move_messages():
            pass
        ended = all(place == len(self.plan.rows[node]) for node, place in self.place.items())
        return ended and not any(self.sends.values()) and not any(self.receives.values())

    def _move_rows(self) -> bool:
        moved = False
        for node, row in self.plan.rows.items():
            while self.place[node] < len(row) and self._possible(node, row[self.place[node]]):
                self.place[node] += 1
                moved = True
        return moved

    def _possible(self, node, action: Action) -> bool:
        chunk, kind, microbatch = action
        stages, tail = self.plan.topology.num_stages, self.plan.topology.num_chunks - 1
        if kind in (Kind.SEND_F, Kind.SEND_B):
            made_by = Kind.F if kind is Kind.SEND_F else Kind.B
            if Action(chunk, made_by, microbatch) not in self.done:
                return False
            other = chunk + 1 if kind is Kind.SEND_F else chunk - 1
            receive = Action(other, Kind.RECV_F if kind is Kind.SEND_F else Kind.RECV_B, microbatch)
            lane = self.lane[node.stage, other % stages, min(chunk, other)]
            self.sends[lane, node].append((action, receive))
        elif kind in (Kind.RECV_F, Kind.RECV_B):
            other = chunk - 1 if kind is Kind.RECV_F else chunk + 1
            send = Action(other, Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B, microbatch)
            lane = self.lane[other % stages, node.stage, min(chunk, other)]
            self.receives[lane, node].append((send, action))
        elif kind is Kind.F:
            if chunk > 0 and not self._has_input(chunk, chunk - 1, "F", microbatch):
                return False
            self.done.add(action)
        else:
            if Action(chunk, Kind.F, microbatch) not in self.done:
                return False
            if chunk < tail and not self._has_input(chunk, chunk + 1, "B", microbatch):
                return False
            self.done.add(action)
        return True

    def _has_input(self, chunk: int, source: int, direction: str, microbatch: int | None) -> bool:
        if chunk % self.plan.topology.num_stages == source % self.plan.topology.num_stages:
            return Action(source, Kind(direction), microbatch) in self.done
        return (chunk, direction, microbatch) in self.inputs

    def _move_messages(self) -> bool:
        for sends in self.sends.values():
            for receives in self.receives.values():
                if sends and receives and sends[0] == receives[0]:
                    receive = sends.pop(0)[1]
                    receives.pop(0)
                    self.inputs.add(
                        (receive.chunk, "F" if receive.kind is Kind.RECV_F else "B", receive.microbatch)
                    )
                    return True
        return False
