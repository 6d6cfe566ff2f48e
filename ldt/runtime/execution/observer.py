"""An object that sees what a rank runs, before and after each forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

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

    def around(self, action: Action) -> AbstractContextManager[object]:
        """Return a context in which the action runs."""
        if self._observer is None or action.kind not in (Kind.F, Kind.B, Kind.W):
            return nullcontext()
        return _Observed(self._observer, action, self.is_last(action))


class _Observed:
    """Not made by ``contextlib.contextmanager``, which changes an exception that passes through."""

    def __init__(self, observer: Observer, action: Action, last: bool) -> None:
        assert action.microbatch is not None, action
        self._after: Callable[..., None] = observer.after_forward
        self._before: Callable[..., None] = observer.before_forward
        self._details: tuple[int | bool, ...] = (action.chunk, action.microbatch)
        if action.kind is not Kind.F:
            self._before, self._after = observer.before_backward, observer.after_backward
            self._details = (*self._details, last)

    def __enter__(self) -> None:
        self._before(*self._details)

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        if kind is None:
            self._after(*self._details)
