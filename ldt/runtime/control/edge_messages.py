"""Messages between leaders on lanes whose receivers post receives ahead, so that each takes one way of the link."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from ldt._C import Lane, LaneError
from ldt.errors import LdtError
from ldt.runtime.control.collectives import MAX_BYTES, as_bytes, as_tensor
from ldt.runtime.health.failure_detector import FailureDetector

__all__ = ["MAX_CONTENT_BYTES", "EdgeMessage", "Inbox", "Outbox", "Subject"]

_FRAME_BYTES = 1 << 18  # size of a posted receive; gloo also receives shorter messages into it
_HEAD_BYTES = 24  # subject, number and the bytes of the content, in 8 bytes each
_SUBJECT_BITS = 8  # of the first; the rest has the bytes of the command
MAX_CONTENT_BYTES = MAX_BYTES - _HEAD_BYTES  # the limit of the broadcast within a node
# Posted receives: for the next step's message, this step's shapes (one message a lap), its token count.
_AHEAD = 4


class Subject(IntEnum):
    """Kind of an edge message."""

    STEP = 1
    SAME_STEP = 2  # everything as in the last step's message
    TOKENS = 3
    SHAPES = 4  # what chunks return
    COMMAND = 5  # in place of a step's message: see ldt.follow

    @property
    def queue(self) -> Subject:
        """What it is asked for by."""
        return Subject.STEP if self in (Subject.SAME_STEP, Subject.COMMAND) else self


class EdgeMessage(NamedTuple):
    """A message of the edge, or to it, for the call with ``number``. ``command`` is for ranks that follow the edge."""

    subject: Subject
    number: int
    content: bytes = b""
    command: bytes = b""

    @property
    def nbytes(self) -> int:
        """Size on the wire, per receiving leader."""
        return _HEAD_BYTES + len(self.content) + len(self.command)

    def to_bytes(self) -> bytes:
        head = (self.subject | len(self.command) << _SUBJECT_BITS, self.number, len(self.content))
        return b"".join(value.to_bytes(8, "little") for value in head) + self.content + self.command

    @classmethod
    def from_bytes(cls, data: bytes) -> EdgeMessage:
        """Inverse of ``to_bytes``. Raises LdtError for anything else."""
        subject, number, length, of_command = cls.head_of(data)
        end = _HEAD_BYTES + length
        if len(data) != end + of_command:
            raise LdtError(f"expected an edge message of {end + of_command} bytes, got {len(data)}")
        return cls(subject, number, data[_HEAD_BYTES:end], data[end:])

    @staticmethod
    def head_of(data: bytes) -> tuple[Subject, int, int, int]:
        """Subject, number, and bytes of content and command. Raises LdtError if ``data`` is not an edge message."""
        first, number, length = (int.from_bytes(data[at : at + 8], "little") for at in (0, 8, 16))
        of_command, subject = divmod(first, 1 << _SUBJECT_BITS)
        if subject not in set(Subject) or length + of_command > MAX_CONTENT_BYTES:
            raise LdtError(
                f"expected an edge message of at most {MAX_CONTENT_BYTES} bytes, got subject {subject} and "
                f"{length + of_command} bytes: check that all ranks run the same version of ldt"
            )
        return Subject(subject), number, length, of_command


class Outbox:
    """The sending end, on a leader. ``peers`` are the ranks in the lane's group of the leaders that receive."""

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
    """The receiving end, on a leader: keeps ``_AHEAD`` receives posted from the leader ``peer``."""

    def __init__(self, lane: Lane, peer: int) -> None:
        self.lane = lane
        self._peer = peer
        self._frames = deque(self._post() for _ in range(_AHEAD))
        self._received: defaultdict[Subject, deque[EdgeMessage]] = defaultdict(deque)

    def await_next(self, subject: Subject, what: str, detector: FailureDetector) -> EdgeMessage:
        """Wait for the next message about ``subject``, without a timeout. ``what`` names it in reports of failures.

        Raises RemoteStageError if the mesh fails.
        """
        try:
            with detector.progress.waiting(what):
                return self._take(subject)
        except LaneError as error:
            raise detector.lost(f"waiting for {what}", error) from error

    def _take(self, subject: Subject) -> EdgeMessage:
        """STEP also stands for SAME_STEP and COMMAND."""
        received = self._received[subject]
        while not received:
            edge_message = self._next()
            self._received[edge_message.subject.queue].append(edge_message)
        return received.popleft()

    def _next(self) -> EdgeMessage:
        data = self._next_frame()
        _, _, *lengths = EdgeMessage.head_of(data)
        size = _HEAD_BYTES + sum(lengths)
        while len(data) < size:
            data += self._next_frame()
        return EdgeMessage.from_bytes(data[:size])

    def _next_frame(self) -> bytes:
        work, frame = self._frames.popleft() if self._frames else self._post()
        work.wait()
        with suppress(LaneError):  # the edge is gone: use what has arrived, the next frame raises
            self._frames.append(self._post())
        return as_bytes(frame)

    def _post(self) -> tuple[dist.Work, torch.Tensor]:
        frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8, device="cpu")
        return self.lane.recv([frame], self._peer, label="edge message"), frame
