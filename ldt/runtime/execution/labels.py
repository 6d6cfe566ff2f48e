"""Names actions and their messages in error texts, traces and logs."""

from __future__ import annotations

from ldt.plan import Action
from ldt.runtime.execution.stash import Slot

__all__ = ["describe", "label", "microbatch_of", "slot_of"]


def microbatch_of(action: Action) -> int:
    """The microbatch of an action that has one."""
    assert action.microbatch is not None, action
    return action.microbatch


def slot_of(action: Action) -> Slot:
    """The slot that uses the tensors of a send."""
    return Slot(action.counterpart.chunk, action.kind.direction, microbatch_of(action))


def label(action: Action) -> str:
    """``F0 microbatch 2``, for a send or a receive."""
    return f"{action.kind.direction}{action.hop} microbatch {action.microbatch}"


def describe(action: Action) -> str:
    """``chunk 1, microbatch 2``."""
    where = "" if action.microbatch is None else f", microbatch {action.microbatch}"
    return f"chunk {action.chunk}{where}"
