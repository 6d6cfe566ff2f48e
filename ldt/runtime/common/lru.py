"""Caches the most recently used values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["LruCache"]

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """Keeps the ``size`` most recently used values."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """The value for ``key``, from ``compute`` if it is not cached."""
        if key not in self._values:
            self._values[key] = compute()
            if len(self._values) > self._size:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]

    def peek(self, key: Hashable) -> Value | None:
        """The value for ``key``, or None if it is not cached. Does not count as a use."""
        return self._values.get(key)

    def clear(self) -> None:
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)
