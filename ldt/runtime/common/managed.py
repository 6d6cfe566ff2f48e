"""Context managers from generators that pass the user's exceptions through unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

from ldt.runtime.common.error_text import safe_isinstance

__all__ = ["managed"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Managed(AbstractContextManager[_T], Generic[_T]):
    def __init__(self, body: Iterator[_T]) -> None:
        self._body = body

    def __enter__(self) -> _T:
        return next(self._body)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            next(self._body, None)
            return
        try:
            self._body.throw(error)  # type: ignore[attr-defined]
        except BaseException as raised:
            # A generator turns a StopIteration into a RuntimeError.
            if raised is not error and not (
                safe_isinstance(error, StopIteration) and raised.__cause__ is error
            ):
                raise
            # Without this frame, which has the error: a cycle would keep what its frames hold, such as lanes.
            BaseException.with_traceback(error, trace)


def managed(function: Callable[_P, Iterator[_T]]) -> Callable[_P, AbstractContextManager[_T]]:
    """Like ``contextlib.contextmanager``, but sets no attribute on exceptions: those of frozen classes would refuse."""

    @functools.wraps(function)
    def manager(*args: _P.args, **kwargs: _P.kwargs) -> AbstractContextManager[_T]:
        return _Managed(function(*args, **kwargs))

    return manager
