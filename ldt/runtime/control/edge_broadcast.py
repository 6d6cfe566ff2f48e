"""Broadcasts the edge's messages to all ranks: step messages, ahead of their steps if possible, shapes, token counts.

Each edge leader has a lane to the leaders of all other nodes, which post receives ahead of time. A message travels
while the previous step runs, and takes one one-way trip over the link.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial

import torch.distributed as dist

from ldt._C import Lane
from ldt.runtime.comm.group_layout import edge_broadcast_name
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.common.teardown import run_teardown
from ldt.runtime.common.time_left import time_left
from ldt.runtime.control.collectives import Collectives
from ldt.runtime.control.edge_messages import EdgeMessage, Inbox, Outbox, Subject
from ldt.runtime.control.stage_chain import StageChain, make_stage_chain
from ldt.runtime.health.failure_detector import FailureDetector
from ldt.topology import Node

__all__ = ["EdgeBroadcast", "make_edge_broadcast"]

_TEXTS = {
    Subject.STEP: "a step message",
    Subject.TOKENS: "the token count",
    Subject.SHAPES: "the shapes of hops",
}


class EdgeBroadcast:
    """This rank's ends: the ``outbox`` of an edge leader, and a leader's ``inboxes`` by edge replica.

    ``chain`` brings messages from the cloud back to the edge.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        collectives: Collectives,
        detector: FailureDetector,
        outbox: Outbox | None,
        inboxes: Mapping[int, Inbox],
        chain: StageChain,
    ) -> None:
        self._rank_info = rank_info
        self._collectives = collectives
        self._detector = detector
        self._outbox = outbox
        self._inboxes = inboxes
        self._own: defaultdict[Subject, deque[EdgeMessage]] = defaultdict(deque)
        self._peeked: list[EdgeMessage] = []
        self.chain = chain

    def send(self, edge_message: EdgeMessage) -> None:
        """Send a message to all ranks. Called on edge leaders."""
        self._own[edge_message.subject.queue].append(edge_message)
        if self._outbox is not None:
            self._outbox.send(edge_message)

    def receive(self, subject: Subject = Subject.STEP) -> list[EdgeMessage]:
        """The next message about ``subject`` of each edge replica. Returns the same on every rank.

        A collective call of the ranks of a node. Waits without a timeout. Raises RemoteStageError if the mesh fails.
        """
        if subject is Subject.STEP and self._peeked:
            edge_messages, self._peeked = self._peeked, []
            return edge_messages
        edge_messages = []
        for replica in range(self._rank_info.topology.edge_dp):
            data = b""
            if self._rank_info.is_leader:
                data = self._take(replica, subject).to_bytes()
            edge_messages.append(
                EdgeMessage.from_bytes(self._collectives.broadcast_in_node(data, no_timeout=True))
            )
        return edge_messages

    def peek(self) -> list[EdgeMessage]:
        """What the next ``receive()`` returns. Like it a collective call of the ranks of a node."""
        self._peeked = self.receive()
        return self._peeked

    def lanes(self) -> list[Lane]:
        """The lanes that this rank has an end of."""
        return [
            *(outbox.lane for outbox in self._outboxes()),
            *(inbox.lane for inbox in self._all_inboxes()),
        ]

    def abort(self, reason: str) -> None:
        """Abort all transfers in flight. May be called from any thread."""
        run_teardown((f"abort lane {lane.name}", partial(lane.abort, reason)) for lane in self.lanes())

    def close(self, deadline: float) -> None:
        """Finish sending by ``deadline``, and stop receiving."""
        ends: list[tuple[str, Callable[[], None]]] = [
            (f"abort lane {inbox.lane.name}", partial(inbox.lane.abort, "the mesh is closed"))
            for inbox in self._all_inboxes()
        ]
        for outbox in self._outboxes():
            lane = outbox.lane
            ends.append((f"close lane {lane.name}", lambda lane=lane: lane.close(time_left(deadline))))  # type: ignore[misc]
        first = run_teardown(ends)
        if first is not None:
            raise first

    def _outboxes(self) -> list[Outbox]:
        return [*([] if self._outbox is None else [self._outbox]), *self.chain.outboxes.values()]

    def _all_inboxes(self) -> list[Inbox]:
        return [*self._inboxes.values(), *self.chain.inboxes.values()]

    def _take(self, replica: int, subject: Subject) -> EdgeMessage:
        if self._rank_info.node == Node(0, replica):
            return self._own[subject].popleft()
        what = f"{_TEXTS[subject]} of rank {self._edge_rank(replica)}, the edge"
        return self._inboxes[replica].await_next(subject, what, self._detector)

    def _edge_rank(self, replica: int) -> int:
        return self._rank_info.ranks[self._rank_info.edge_leader(replica)]


def make_edge_broadcast(
    rank_info: RankInfo,
    collectives: Collectives,
    detector: FailureDetector,
    groups: Mapping[str, dist.ProcessGroup],
) -> EdgeBroadcast:
    """Create this rank's ends over ``groups``, and post the first receives."""
    nodes = rank_info.topology.nodes
    outbox: Outbox | None = None
    inboxes: dict[int, Inbox] = {}
    for replica in range(rank_info.topology.edge_dp):
        name = edge_broadcast_name(replica)
        if name in groups and rank_info.is_leader:
            lane = Lane(name, p2p=groups[name], stage=None, timeout=math.inf)
            edge = nodes.index(Node(0, replica))
            if rank_info.node == nodes[edge]:
                outbox = Outbox(lane, [rank for rank in range(len(nodes)) if rank != edge])
            else:
                inboxes[replica] = Inbox(lane, edge)
    chain = make_stage_chain(rank_info, collectives, detector, groups)
    return EdgeBroadcast(rank_info, collectives, detector, outbox, inboxes, chain)
