"""An object that sees what a rank runs, before and after each forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ldt.plan import Action, Kind

__all__ = ["ActionWatch", "Observer"]


class Observer:
    """Override what you need: ``Pipeline(observer=...)`` calls it on this rank, on the thread that runs the step.

    What a method raises fails the step, as an error of the chunk would. ``chunk`` is the number of the chunk in the
    whole model, ``microbatch`` that of the plan.
    """

    def before_forward(self, chunk: int, microbatch: int) -> None:
        """Called before the chunk runs, in ``step`` and ``eval``."""

    def after_forward(self, chunk: int, microbatch: int) -> None:
        """Called once the chunk has returned, and the loss of the last one is computed."""

    def before_backward(self, chunk: int, microbatch: int, last: bool) -> None:
        """Called before a backward that computes gradients of weights: a whole one, or the W of a split one.

        ``last``: no other of this chunk follows in this step.
        """

    def after_backward(self, chunk: int, microbatch: int, last: bool) -> None:
        """Called once these gradients are in ``.grad``."""


class ActionWatch:
    """Calls an observer around the actions of a ``row``."""

    def __init__(self, observer: Observer | None, row: Sequence[Action]) -> None:
        self._observer = observer
        self._last = {action.chunk: action for action in row if action.kind in (Kind.B, Kind.W)}

    def is_last(self, action: Action) -> bool:
        """Whether ``action`` is the last of its chunk that computes gradients of weights."""
        return action == self._last.get(action.chunk)

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        if self._observer is None or action.kind not in (Kind.F, Kind.B, Kind.W) or action.microbatch is None:
            yield
            return
        before: Callable[..., None] = self._observer.before_backward
        after: Callable[..., None] = self._observer.after_backward
        details: tuple[int | bool, ...] = (action.chunk, action.microbatch, self.is_last(action))
        if action.kind is Kind.F:
            before, after, details = self._observer.before_forward, self._observer.after_forward, details[:2]
        before(*details)
        yield
        after(*details)
