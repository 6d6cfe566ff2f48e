"""Broadcasts the edge's messages to all ranks: step messages, ahead of their steps if possible, and token counts.

Each edge leader has a lane to the leaders of all other nodes, which post receives ahead of time. A message travels
while the previous step runs, and takes one one-way trip over the link.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ldt._C import Lane, LaneError
from ldt.errors import LdtError
from ldt.runtime.comm.group_layout import edge_broadcast_name
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.common.teardown import run_teardown
from ldt.runtime.common.time_left import time_left
from ldt.runtime.control.collectives import MAX_BYTES, Collectives, as_bytes, as_tensor
from ldt.runtime.health.failure_detector import FailureDetector
from ldt.topology import Node

__all__ = [
    "MAX_CONTENT_BYTES",
    "EdgeBroadcast",
    "EdgeMessage",
    "Inbox",
    "Outbox",
    "Subject",
    "make_edge_broadcast",
]

_FRAME_BYTES = 1 << 18  # size of a posted receive; gloo also receives shorter messages into it
_HEAD_BYTES = 24  # subject, number and the bytes that follow, in 8 bytes each
MAX_CONTENT_BYTES = MAX_BYTES - _HEAD_BYTES  # the limit of the broadcast within a node
_AHEAD = 2  # posted receives: for the next step's message and this step's token count


class Subject(IntEnum):
    """Kind of an edge message."""

    STEP = 1
    SAME_STEP = 2  # everything as in the last step's message
    TOKENS = 3


class EdgeMessage(NamedTuple):
    """A message of the edge for the call with ``number``."""

    subject: Subject
    number: int
    content: bytes = b""

    @property
    def nbytes(self) -> int:
        """Size on the wire, per receiving leader."""
        return _HEAD_BYTES + len(self.content)

    def to_bytes(self) -> bytes:
        head = (int(self.subject), self.number, len(self.content))
        return b"".join(value.to_bytes(8, "little") for value in head) + self.content

    @classmethod
    def from_bytes(cls, data: bytes) -> EdgeMessage:
        """Inverse of ``to_bytes``. Raises LdtError for anything else."""
        subject, number, length = cls.head_of(data)
        if len(data) != _HEAD_BYTES + length:
            raise LdtError(f"expected an edge message of {_HEAD_BYTES + length} bytes, got {len(data)}")
        return cls(subject, number, data[_HEAD_BYTES:])

    @staticmethod
    def head_of(data: bytes) -> tuple[Subject, int, int]:
        """Subject, number and content length. Raises LdtError if ``data`` is not an edge message."""
        subject, number, length = (int.from_bytes(data[at : at + 8], "little") for at in (0, 8, 16))
        if subject not in set(Subject) or length > MAX_CONTENT_BYTES:
            raise LdtError(
                f"expected an edge message of at most {MAX_CONTENT_BYTES} bytes, got subject {subject} and {length} "
                "bytes: check that all ranks run the same version of ldt"
            )
        return Subject(subject), number, length


class Outbox:
    """The sending end, on an edge leader. ``peers`` are the other leaders' ranks in the lane's group."""

    def __init__(self, lane: Lane, peers: Sequence[int]) -> None:
        self.lane = lane
        self._peers = peers

    def send(self, edge_message: EdgeMessage) -> None:
        """Start sending to all peers. Errors surface at the receivers, which wait for the message."""
        data = edge_message.to_bytes()
        for peer in self._peers:
            for start in range(0, len(data), _FRAME_BYTES):
                frame = as_tensor(data[start : start + _FRAME_BYTES])
                self.lane.send([frame], peer, label=f"{edge_message.subject.name} {edge_message.number}")


class Inbox:
    """The receiving end, on a leader: keeps ``_AHEAD`` receives posted from the edge leader ``peer``."""

    def __init__(self, lane: Lane, peer: int) -> None:
        self.lane = lane
        self._peer = peer
        self._frames = deque(self._post() for _ in range(_AHEAD))
        self._received: defaultdict[bool, deque[EdgeMessage]] = defaultdict(deque)  # token counts, and others

    def take(self, tokens: bool) -> EdgeMessage:
        """Wait for the next token count, or the next step message."""
        received = self._received[tokens]
        while not received:
            edge_message = self._next()
            self._received[edge_message.subject is Subject.TOKENS].append(edge_message)
        return received.popleft()

    def _next(self) -> EdgeMessage:
        data = self._next_frame()
        subject, number, length = EdgeMessage.head_of(data)
        while len(data) < _HEAD_BYTES + length:
            data += self._next_frame()
        return EdgeMessage(subject, number, data[_HEAD_BYTES : _HEAD_BYTES + length])

    def _next_frame(self) -> bytes:
        work, frame = self._frames.popleft() if self._frames else self._post()
        work.wait()
        with suppress(LaneError):  # the edge is gone: use what has arrived, the next frame raises
            self._frames.append(self._post())
        return as_bytes(frame)

    def _post(self) -> tuple[dist.Work, torch.Tensor]:
        frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8, device="cpu")
        return self.lane.recv([frame], self._peer, label="edge message"), frame


class EdgeBroadcast:
    """This rank's ends: the ``outbox`` of an edge leader, and a leader's ``inboxes`` by edge replica."""

    def __init__(
        self,
        rank_info: RankInfo,
        collectives: Collectives,
        detector: FailureDetector,
        outbox: Outbox | None,
        inboxes: Mapping[int, Inbox],
    ) -> None:
        self._rank_info = rank_info
        self._collectives = collectives
        self._detector = detector
        self._outbox = outbox
        self._inboxes = inboxes
        self._own: defaultdict[bool, deque[EdgeMessage]] = defaultdict(deque)

    def send(self, edge_message: EdgeMessage) -> None:
        """Send a message to all ranks. Called on edge leaders."""
        self._own[edge_message.subject is Subject.TOKENS].append(edge_message)
        if self._outbox is not None:
            self._outbox.send(edge_message)

    def receive(self, *, tokens: bool = False) -> list[EdgeMessage]:
        """The next step message, or token count, of each edge replica. Returns the same on every rank.

        A collective call of the ranks of a node. Waits without a timeout. Raises RemoteStageError if the mesh fails.
        """
        edge_messages = []
        for replica in range(self._rank_info.topology.edge_dp):
            data = b""
            if self._rank_info.is_leader:
                data = self._take(replica, tokens).to_bytes()
            edge_messages.append(
                EdgeMessage.from_bytes(self._collectives.broadcast_in_node(data, no_timeout=True))
            )
        return edge_messages

    def lanes(self) -> list[Lane]:
        """The lanes that this rank has an end of."""
        return [end.lane for end in [self._outbox, *self._inboxes.values()] if end is not None]

    def abort(self, reason: str) -> None:
        """Abort all transfers in flight. May be called from any thread."""
        run_teardown((f"abort lane {lane.name}", partial(lane.abort, reason)) for lane in self.lanes())

    def close(self, deadline: float) -> None:
        """Finish sending by ``deadline``, and stop receiving."""
        ends: list[tuple[str, Callable[[], None]]] = [
            (f"abort lane {inbox.lane.name}", partial(inbox.lane.abort, "the mesh is closed"))
            for inbox in self._inboxes.values()
        ]
        if self._outbox is not None:
            lane = self._outbox.lane
            ends.append((f"close lane {lane.name}", lambda: lane.close(time_left(deadline))))
        first = run_teardown(ends)
        if first is not None:
            raise first

    def _take(self, replica: int, tokens: bool) -> EdgeMessage:
        if self._rank_info.node == Node(0, replica):
            return self._own[tokens].popleft()
        what = f"{'the token count' if tokens else 'a step message'} of rank {self._edge_rank(replica)}, the edge"
        try:
            with self._detector.progress.waiting(what):
                return self._inboxes[replica].take(tokens)
        except LaneError as error:
            raise self._detector.lost(f"waiting for {what}", error) from error

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
    return EdgeBroadcast(rank_info, collectives, detector, outbox, inboxes)
