"""Finds tensors that share memory in the unsplit model, but not over a hop, and that a chunk changes in place.

The sending rank knows whether anything else refers to a tensor's memory: another output, a tensor that a module keeps,
or another element of the same tensor. The receiving rank knows whether its chunk changes the tensor in place. Either
alone is fine. Each publishes the first occurrence as a key in the mesh's store and then looks up the other's key, so
the later of the two finds both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ldt._torch_private import view_base
from ldt.errors import LdtError
from ldt.runtime.common.chunk_outputs import entries_of
from ldt.runtime.common.kept import Kept
from ldt.runtime.common.peer_messages import parse, read_or_raise

__all__ = ["Aliasing", "passthrough_outputs"]


class Aliasing:
    """What this rank knows of the hops of one pipeline. Asks ``store`` once per event.

    Every method raises LdtError if a chunk changes in place a tensor whose memory is shared on the sending rank.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self._published: set[str] = set()

    def shares(self, hop: int, indices: Iterable[int]) -> None:
        """Report that something else refers to the memory of the tensors at ``indices`` of ``hop``."""
        for index in indices:
            if self._publish("shared", hop, index):
                if self._is_published("changed", hop, index):
                    raise LdtError(_conflict(hop, index))
                if self._is_published("passed", hop, index):
                    who = f"the rank of chunk {hop + 1}"
                    value = self._store.get(self._name("passed", hop, index))
                    self.shares(hop + 1, [read_or_raise(value, _parse_output_index, who)])

    def changes(self, hop: int, indices: Iterable[int]) -> None:
        """Report that the chunk behind ``hop`` changed the received tensors at ``indices`` in place."""
        for index in indices:
            if self._publish("changed", hop, index) and self._is_published("shared", hop, index):
                raise LdtError(_conflict(hop, index))

    def passes(self, hop: int, pairs: Iterable[tuple[int, int]]) -> None:
        """Report that the chunk behind ``hop`` returned what it received, or a view: (input, output) indices."""
        for index, output in pairs:
            if self._publish("passed", hop, index, str(output)) and self._is_published("shared", hop, index):
                self.shares(hop + 1, [output])

    def _publish(self, what: str, hop: int, index: int, value: str = "1") -> bool:
        """Set the key. Returns False if this rank has set it before."""
        name = self._name(what, hop, index)
        if name in self._published:
            return False
        self._published.add(name)
        self._store.set(name, value)
        return True

    def _is_published(self, what: str, hop: int, index: int) -> bool:
        return bool(self._store.check([self._name(what, hop, index)]))

    def _name(self, what: str, hop: int, index: int) -> str:
        return f"{self._key}/aliasing/{_mode()}/{hop}/{what}/{index}"


def passthrough_outputs(inputs: Sequence[torch.Tensor], output: Any) -> list[tuple[int, int]]:
    """Return the (input, output) indices where ``output`` holds an input itself or a view of it.

    Kept outputs have no index.
    """
    index_of = {id(tensor): index for index, tensor in enumerate(inputs)}
    found = []
    sent = (entry for entry in entries_of(output) if not isinstance(entry, Kept))
    for index, tensor in enumerate(sent):
        root = id(view_base(tensor) if isinstance(tensor, torch.Tensor) else tensor)
        if root in index_of:
            found.append((index_of[root], index))
    return found


def _parse_output_index(value: bytes) -> int:
    """Raises TypeError or ValueError if ``value`` is not the index of an output."""
    index = parse(value)
    if type(index) is not int or index < 0:
        raise TypeError("expected the index of an output")
    return index


def _mode() -> str:
    """Keep steps and evals apart: without a graph that needs its inputs, a module may work in place."""
    return "step" if torch.is_grad_enabled() else "eval"


def _conflict(hop: int, index: int) -> str:
    return (
        f"chunk {hop + 1} changes input {index} in place, and on the rank of chunk {hop} something else refers to the "
        "memory of that output: another output, a tensor that a module or hook keeps, a graph that saved it, or "
        "another element of the same tensor, as after expand(). The unsplit model would change that as well, a split "
        "one does not: clone() the tensor in one of the two chunks"
    )
