"""Remembers answers, the most recent ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["LruCache"]

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """The ``size`` answers used last, by what was asked."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, ask: Callable[[], Value]) -> Value:
        """The answer for ``key``, from ``ask`` if it is not there."""
        if key not in self._answers:
            self._answers[key] = ask()
            if len(self._answers) > self._size:
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        return self._answers[key]

    def find(self, key: Hashable) -> Value | None:
        """The answer for ``key``, None if it is not there."""
        if key not in self._answers:
            return None
        self._answers.move_to_end(key)
        return self._answers[key]

    def clear(self) -> None:
        self._answers.clear()

    def __len__(self) -> int:
        return len(self._answers)
