"""What the edge asks of ranks that follow it: a call, and what they do after it. JSON of a checked form."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from ldt.errors import LdtError
from ldt.runtime.control.edge_messages import EdgeMessage, Subject
from ldt.untrusted import read_fields

__all__ = ["Command", "CommandName", "agreed_command"]

CommandName = Literal["step", "eval", "train", "save", "load", "stats", "close"]
_CACHED = 16  # most steps have the command of the one before
_MAX_BYTES = 1000  # such a command has fewer than 200
_Number = float | Literal["inf"]


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: The call to make.
        update: After a step: step the optimizer and the scheduler, and drop the gradients.
        max_norm: Before that, clip the gradients' norm to this; None does not.
        norm_type: The type of that norm.
        step: The step to save, or to load; None loads the newest.
        keep: How many saves to keep.
        mode: Whether modules are in train mode from now on.
    """

    name: CommandName
    update: bool = False
    max_norm: _Number | None = None
    norm_type: _Number = 2.0
    step: int | None = None
    keep: int = 2
    mode: bool = True

    def to_bytes(self) -> bytes:
        return _to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Command:
        """Inverse of ``to_bytes``. Raises LdtError for anything else."""
        return _from_bytes(data)


@functools.lru_cache(maxsize=_CACHED)
def _to_bytes(command: Command) -> bytes:
    fields = {name: _finite(value) for name, value in asdict(command).items()}
    return json.dumps(fields, allow_nan=False).encode()


@functools.lru_cache(maxsize=_CACHED)
def _from_bytes(data: bytes) -> Command:
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has {len(data)} bytes, the limit is {_MAX_BYTES}")
        return read_fields(Command, data)
    except ValueError as error:
        raise LdtError(
            f"this is not a command of ldt.Leader: {error}; run one version of ldt everywhere"
        ) from None


def _finite(value: object) -> object:
    """JSON has no infinity."""
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def agreed_command(edge_messages: Sequence[EdgeMessage]) -> Command:
    """The command of all edge replicas. Raises LdtError if they differ, or if a step comes without one."""
    if not all(edge_message.command for edge_message in edge_messages):
        raise LdtError(
            "the edge called its pipeline itself: while other ranks follow it, it must call those of ldt.Leader"
        )
    commands = [Command.from_bytes(edge_message.command) for edge_message in edge_messages]
    subjects = {edge_message.subject is Subject.COMMAND for edge_message in edge_messages}
    if any(command != commands[0] for command in commands) or len(subjects) > 1:
        raise LdtError("the edge's replicas have different commands: all must make the same calls")
    if (commands[0].name in ("step", "eval")) in subjects:
        raise LdtError(f"the command {commands[0].name} came without a step, or in its place")
    return commands[0]
