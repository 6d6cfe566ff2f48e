"""Actions, the entries of a plan. They print and parse in the format of torch.distributed.pipelining."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from ldt.errors import PlanError
from ldt.topology import Direction

__all__ = ["Action", "Kind"]


class Kind(str, Enum):
    """What an action does."""

    F = "F"  # forward; the tail's includes the loss
    B = "B"  # full backward
    I = "I"  # noqa: E741  gradient of the input only
    W = "W"  # gradient of the weights only
    SEND_F = "SEND_F"  # send this chunk's output to the next chunk
    RECV_F = "RECV_F"  # receive this chunk's input from the chunk before
    SEND_B = "SEND_B"  # send the gradient of this chunk's input to the chunk before
    RECV_B = "RECV_B"  # receive the gradient of this chunk's output from the next chunk
    REDUCE_GRAD = "REDUCE_GRAD"  # average this chunk's gradients over the replicas

    # Actions are dictionary keys everywhere, and Enum's own hash is a slow Python function.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        return str(self.value)

    # Set once: a property of an Enum member costs as much as handling one action.
    is_compute: bool
    is_send: bool
    is_receive: bool
    is_comm: bool  # a send or receive, which uses a lane

    def __init__(self, value: str) -> None:
        self.is_compute = value in ("F", "B", "I", "W")
        self.is_send = value.startswith("SEND")
        self.is_receive = value.startswith("RECV")
        self.is_comm = self.is_send or self.is_receive

    @property
    def direction(self) -> Direction:
        """Activations ("F") or gradients ("B"). Only for sends and receives."""
        assert self.is_comm, self
        return "F" if self in (Kind.SEND_F, Kind.RECV_F) else "B"


# [0-9], because \d matches the digits of every script. 18 digits exceed any index and stay below the limit of int().
_PATTERN = re.compile(r"([0-9]{1,18})(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|[FBIW])([0-9]{0,18})")


class Action(NamedTuple):
    """``2F3`` is the forward of chunk 2 for microbatch 3; only ``0REDUCE_GRAD`` has no microbatch."""

    chunk: int
    kind: Kind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text that ``str`` returns. Raises PlanError for anything else."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None or (match[2] == "REDUCE_GRAD") != (match[3] == ""):
            raise PlanError(
                f"expected an action such as '2F3', '1SEND_F3' or '0REDUCE_GRAD', got {_start_of(text)!r}"
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]) if match[3] else None)

    @classmethod
    def send_of(cls, hop: int, direction: Direction, microbatch: int | None) -> Action:
        """The send over hop c -> c+1: chunk c sends its output ("F"), or chunk c+1 the gradient of its input ("B")."""
        if direction == "F":
            return cls(hop, Kind.SEND_F, microbatch)
        return cls(hop + 1, Kind.SEND_B, microbatch)

    @property
    def hop(self) -> int:
        """The chunk c of the hop c -> c+1 that a send or receive crosses."""
        assert self.kind.is_comm, self
        return self.chunk if self.kind in (Kind.SEND_F, Kind.RECV_B) else self.chunk - 1

    @property
    def counterpart(self) -> Action:
        """The receive of a send, or the send of a receive, at the other end of the hop."""
        kind, step = _COUNTERPART[self.kind]
        return Action(self.chunk + step, kind, self.microbatch)


def _start_of(text: str) -> str:
    """The beginning of a text, for an error."""
    text = text.strip()
    return text if len(text) <= 40 else f"{text[:40]}... ({len(text)} characters)"


_COUNTERPART = {
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
}
