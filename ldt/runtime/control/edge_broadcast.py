"""What the edge tells all ranks unasked: step messages, ahead of their steps if it can, and numbers of tokens.

Each leader of the edge has a lane to the leaders of all other nodes, on which receives are posted ahead: a message is
under way while the step before it runs, and takes no longer than the link does one way.
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

_FRAME_BYTES = (
    1 << 18
)  # posted ahead; gloo takes a shorter one into it, so that a short message is short on the wire
_HEAD_BYTES = 24  # subject, number and the bytes that follow, in 8 bytes each
MAX_CONTENT_BYTES = MAX_BYTES - _HEAD_BYTES  # as much as goes on within a node
_AHEAD = 2  # frames: the message of the next step, and the number of tokens of this one


class Subject(IntEnum):
    """What a letter is about."""

    STEP = 1
    SAME_STEP = 2  # all as in the last step's message
    TOKENS = 3


class EdgeMessage(NamedTuple):
    """``number`` is that of the call which the letter is for."""

    subject: Subject
    number: int
    content: bytes = b""

    @property
    def nbytes(self) -> int:
        """On the wire, to each of the others."""
        return _HEAD_BYTES + len(self.content)

    def to_bytes(self) -> bytes:
        head = (int(self.subject), self.number, len(self.content))
        return b"".join(value.to_bytes(8, "little") for value in head) + self.content

    @classmethod
    def from_bytes(cls, data: bytes) -> EdgeMessage:
        """What ``to_bytes`` gave. Raises LdtError for anything else."""
        subject, number, length = cls.head_of(data)
        if len(data) != _HEAD_BYTES + length:
            raise LdtError(
                f"a letter with {length} bytes of content was announced, {len(data)} bytes came in all"
            )
        return cls(subject, number, data[_HEAD_BYTES:])

    @staticmethod
    def head_of(data: bytes) -> tuple[Subject, int, int]:
        """Subject, number and length of the content. Raises LdtError for what is no letter."""
        subject, number, length = (int.from_bytes(data[at : at + 8], "little") for at in (0, 8, 16))
        if subject not in set(Subject) or length > MAX_CONTENT_BYTES:
            raise LdtError(
                f"expected a letter of the edge of at most {MAX_CONTENT_BYTES} bytes, got subject {subject} and "
                f"{length} bytes: do all ranks run one version of ldt?"
            )
        return Subject(subject), number, length


class Outbox:
    """Where a leader of the edge sends from; ``peers`` are the ranks of the other leaders in the lane's group."""

    def __init__(self, lane: Lane, peers: Sequence[int]) -> None:
        self.lane = lane
        self._peers = peers

    def send(self, edge_message: EdgeMessage) -> None:
        """Start sending to all. What goes wrong shows where it is waited for, at the other ends."""
        data = edge_message.to_bytes()
        for peer in self._peers:
            for start in range(0, len(data), _FRAME_BYTES):
                frame = as_tensor(data[start : start + _FRAME_BYTES])
                self.lane.send([frame], peer, label=f"{edge_message.subject.name} {edge_message.number}")


class Inbox:
    """Where a leader receives from the edge's leader ``peer``. Always ``_AHEAD`` frames can come."""

    def __init__(self, lane: Lane, peer: int) -> None:
        self.lane = lane
        self._peer = peer
        self._frames = deque(self._post() for _ in range(_AHEAD))
        self._kept: defaultdict[bool, deque[EdgeMessage]] = defaultdict(
            deque
        )  # by whether they are about tokens

    def take(self, tokens: bool) -> EdgeMessage:
        """The next letter about tokens, or the next about a step; waits for it."""
        kept = self._kept[tokens]
        while not kept:
            edge_message = self._next()
            self._kept[edge_message.subject is Subject.TOKENS].append(edge_message)
        return kept.popleft()

    def _next(self) -> EdgeMessage:
        data = self._next_frame()
        subject, number, length = EdgeMessage.head_of(data)
        while len(data) < _HEAD_BYTES + length:
            data += self._next_frame()
        return EdgeMessage(subject, number, data[_HEAD_BYTES : _HEAD_BYTES + length])

    def _next_frame(self) -> bytes:
        work, frame = self._frames.popleft() if self._frames else self._post()
        work.wait()
        with suppress(
            LaneError
        ):  # where the edge is gone: what has come is used, and the frame that is missing raises
            self._frames.append(self._post())
        return as_bytes(frame)

    def _post(self) -> tuple[dist.Work, torch.Tensor]:
        frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8, device="cpu")
        return self.lane.recv([frame], self._peer, label="letter"), frame


class EdgeBroadcast:
    """This rank's ends: a ``outbox`` on a leader of the edge, and ``inboxes``, by replica of the edge, on leaders."""

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
        """Send to all ranks, from a leader of the edge."""
        self._own[edge_message.subject is Subject.TOKENS].append(edge_message)
        if self._outbox is not None:
            self._outbox.send(edge_message)

    def receive(self, *, tokens: bool = False) -> list[EdgeMessage]:
        """The next letter of each leader of the edge, by replica, on every rank: about tokens, or about a step.

        Waits as long as it takes. A collective call of the ranks of a node. Raises RemoteStageError if the mesh fails.
        """
        edge_messages = []
        for replica in range(self._rank_info.topology.edge_dp):
            data = b""
            if self._rank_info.is_leader:
                data = self._from(replica, tokens).to_bytes()
            edge_messages.append(
                EdgeMessage.from_bytes(self._collectives.broadcast_in_node(data, patient=True))
            )
        return edge_messages

    def lanes(self) -> list[Lane]:
        """Those that this rank has an end of."""
        return [end.lane for end in [self._outbox, *self._inboxes.values()] if end is not None]

    def abort(self, reason: str) -> None:
        """Abort what is under way. Called from any thread."""
        run_teardown((f"abort lane {lane.name}", partial(lane.abort, reason)) for lane in self.lanes())

    def close(self, deadline: float) -> None:
        """Finish sending by ``deadline``. Nothing is received any more."""
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

    def _from(self, replica: int, tokens: bool) -> EdgeMessage:
        if self._rank_info.node == Node(0, replica):
            return self._own[tokens].popleft()
        what = f"{'the number of tokens' if tokens else 'a step message'} of rank {self._edge_rank(replica)}, the edge"
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
    """This rank's ends, over ``groups``. Receives are posted from now on."""
    nodes = rank_info.topology.nodes
    outbox: Outbox | None = None
    inboxes: dict[int, Inbox] = {}
    for replica in range(rank_info.topology.edge_dp):
        name = edge_broadcast_name(replica)
        if name in groups and rank_info.is_leader:
            lane = Lane(name, p2p=groups[name], stage=None, timeout=math.inf, announce=False)
            edge = nodes.index(Node(0, replica))
            if rank_info.node == nodes[edge]:
                outbox = Outbox(lane, [rank for rank in range(len(nodes)) if rank != edge])
            else:
                inboxes[replica] = Inbox(lane, edge)
    return EdgeBroadcast(rank_info, collectives, detector, outbox, inboxes)
