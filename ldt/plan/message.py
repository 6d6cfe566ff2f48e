"""Messages between chunks: the one a compute action waits for and the one it produces."""

from __future__ import annotations

from typing import NamedTuple

from ldt.plan.action import Action, Kind
from ldt.topology import Channel, Direction

__all__ = ["Message", "message_into", "message_out_of"]


class Message(NamedTuple):
    """One payload: a microbatch on a channel."""

    channel: Channel
    microbatch: int

    def __str__(self) -> str:
        return f"microbatch {self.microbatch} of {self.channel}"


def message_into(action: Action) -> tuple[int, Direction] | None:
    """The hop and direction of a compute action's input; None for the first of its direction."""
    if action.kind is Kind.F:
        return (action.chunk - 1, "F") if action.chunk > 0 else None
    return (action.chunk, "B") if action.kind is not Kind.W else None


def message_out_of(action: Action) -> tuple[int, Direction] | None:
    """The hop and direction of a compute action's result; None for the last of its direction."""
    if action.kind is Kind.F:
        return action.chunk, "F"
    return (action.chunk - 1, "B") if action.kind is not Kind.W and action.chunk > 0 else None
