"""What the edge asks of ranks that follow it: a call, and what they do after it.

JSON of a checked form, and behind it the learning rates, as these may change with every step.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ldt.errors import LdtError
from ldt.runtime.control.edge_messages import EdgeMessage, Subject
from ldt.untrusted import read_fields

__all__ = ["MAX_RATES", "Command", "CommandName", "agreed_command"]

CommandName = Literal["step", "eval", "zero_grad", "train", "save", "load", "stats", "close"]
_CACHED = 16  # most steps have the command of the one before
MAX_RATES = 400  # learning rates in a command
_RATE_BYTES = 8
_MAX_BYTES = 800 + MAX_RATES * _RATE_BYTES  # most commands have fewer than 200
_END = b"\n"  # of the JSON, which has none
_Number = float | Literal["inf"]


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: The call to make.
        update: After a step: step the optimizer and the scheduler, and drop the gradients.
        max_norm: Before that, clip the gradients' norm to this; None does not.
        norm_type: The type of that norm.
        lr: The learning rate of each parameter group of the edge's optimizer, or one for all groups.
        autocast: The dtype that autocast computes in during a step or an eval; None without it.
        step: The step to save, or to load; None loads the newest.
        keep: How many saves to keep.
        mode: Whether modules are in train mode from now on.
    """

    name: CommandName
    update: bool = False
    max_norm: _Number | None = None
    norm_type: _Number = 2.0
    lr: tuple[float, ...] = ()
    autocast: Literal["bfloat16", "float16"] | None = None
    step: int | None = None
    keep: int = 2
    mode: bool = True

    def to_bytes(self) -> bytes:
        if not self.lr:
            return _to_json(self)
        return _to_json(replace(self, lr=())) + _END + struct.pack(f"<{len(self.lr)}d", *self.lr)

    @classmethod
    def from_bytes(cls, data: bytes) -> Command:
        """Inverse of ``to_bytes``. Raises LdtError for anything else."""
        try:
            if len(data) > _MAX_BYTES:
                raise ValueError(f"it has {len(data)} bytes, the limit is {_MAX_BYTES}")
            fields, _, rates = data.partition(_END)
            command = _from_json(fields)
            return replace(command, lr=_rates(rates)) if rates else command
        except ValueError as error:
            raise LdtError(
                f"this is not a command of ldt.Leader: {error}; run one version of ldt everywhere"
            ) from None


@functools.lru_cache(maxsize=_CACHED)
def _to_json(command: Command) -> bytes:
    fields = {name: _finite(value) for name, value in vars(command).items() if name != "lr"}
    return json.dumps(fields, allow_nan=False).encode()


@functools.lru_cache(maxsize=_CACHED)
def _from_json(data: bytes) -> Command:
    command = read_fields(Command, data)
    if command.lr:
        raise ValueError("its learning rates are in the wrong place")
    return command


def _rates(data: bytes) -> tuple[float, ...]:
    if len(data) % _RATE_BYTES:
        raise ValueError(f"its learning rates have {len(data)} bytes, which is no multiple of {_RATE_BYTES}")
    rates = struct.unpack(f"<{len(data) // _RATE_BYTES}d", data)
    if not all(map(math.isfinite, rates)):
        raise ValueError("a learning rate in it is not finite")
    return rates


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
