"""Tensors that share memory in the unsplit model and not over a hop: an error where a chunk changes one in place.

The rank that sends knows whether anything else refers to a tensor's memory, another output, what a module keeps or an
element of its own, and the rank that receives, whether its chunk changes the tensor in place. Either alone is fine.
Each tells the other when it first happens, by a key in the mesh's store, and then looks for the other's: whoever comes
second finds both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ldt.errors import LdtError
from ldt.runtime.common.untrusted import parse, read_or_raise

__all__ = ["Aliasing", "passed_on"]


class Aliasing:
    """Of the hops of one pipeline, as far as this rank knows. Asks ``store`` once for each thing that happens."""

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self._told: set[str] = set()

    def shares(self, hop: int, places: Iterable[int]) -> None:
        """Something else refers to the memory of what goes over ``hop`` at ``places``.

        This and the others raise LdtError if the next chunk changes it in place.
        """
        for place in places:
            if self._tell("shared", hop, place):
                if self._is_told("changed", hop, place):
                    raise LdtError(_conflict(hop, place))
                if self._is_told("passed", hop, place):
                    who = f"the rank of chunk {hop + 1}"
                    told = self._store.get(self._name("passed", hop, place))
                    self.shares(hop + 1, [read_or_raise(told, _output_in, who)])

    def changes(self, hop: int, places: Iterable[int]) -> None:
        """The chunk behind ``hop`` has changed in place what it got."""
        for place in places:
            if self._tell("changed", hop, place) and self._is_told("shared", hop, place):
                raise LdtError(_conflict(hop, place))

    def passes(self, hop: int, pairs: Iterable[tuple[int, int]]) -> None:
        """The chunk behind ``hop`` has returned what it got, or a view of it: at which place, and at which it did."""
        for place, output in pairs:
            if self._tell("passed", hop, place, str(output)) and self._is_told("shared", hop, place):
                self.shares(hop + 1, [output])

    def _tell(self, what: str, hop: int, place: int, value: str = "1") -> bool:
        """True if this rank had not told it yet."""
        name = self._name(what, hop, place)
        if name in self._told:
            return False
        self._told.add(name)
        self._store.set(name, value)
        return True

    def _is_told(self, what: str, hop: int, place: int) -> bool:
        return bool(self._store.check([self._name(what, hop, place)]))

    def _name(self, what: str, hop: int, place: int) -> str:
        return f"{self._key}/aliasing/{_mode()}/{hop}/{what}/{place}"


def passed_on(inputs: Sequence[torch.Tensor], output: Any) -> list[tuple[int, int]]:
    """The places of inputs, and those where a chunk that returns ``output`` passes them on, or views of them."""
    places = {id(tensor): place for place, tensor in enumerate(inputs)}
    found = []
    for place, tensor in enumerate(output if isinstance(output, (tuple, list)) else (output,)):
        is_view = isinstance(tensor, torch.Tensor) and tensor._is_view()
        root = id(tensor._base if is_view else tensor)
        if root in places:
            found.append((places[root], place))
    return found


def _output_in(told: bytes) -> int:
    """Raises TypeError or ValueError for what is no place of an output."""
    place = parse(told)
    if type(place) is not int or place < 0:
        raise TypeError("expected the place of an output")
    return place


def _mode() -> str:
    """A module may work in place where there is no graph that would need what it changes."""
    return "step" if torch.is_grad_enabled() else "eval"


def _conflict(hop: int, place: int) -> str:
    return (
        f"chunk {hop + 1} changes input {place} in place, and on the rank of chunk {hop} something else refers to the "
        "memory of that output: another output, what a module or hook keeps, a graph that saved it, or another element "
        "of its own, as after expand(). In the unsplit model that would change as well, over a hop it does not: "
        "clone() it in one of the two chunks"
    )
