"""Messages over a path, each with data of its own, so that a late, an early and an old one are all wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from clock import settle, total

from ldt.runtime.device import synchronize_current_stream

__all__ = ["Courier", "Path", "Wait"]

Wait = Callable[[], object]


@dataclass(frozen=True)
class Path:
    """One way for a message to get from a rank to others, and this rank's part in it.

    ``start(source, target)`` launches one and returns what waits for it: ``source`` is None where this rank does not
    send, ``target`` where nothing arrives. ``empty(n)`` is memory for n int32 elements that arrive.
    """

    name: str
    sends: bool
    receives: bool
    start: Callable[[torch.Tensor, torch.Tensor], Wait]
    empty: Callable[[int], torch.Tensor]


class Courier:
    """Carries messages of one size over one path and counts what arrives wrong on this rank."""

    def __init__(self, path: Path, nbytes: int, device: torch.device) -> None:
        self.path = path
        self._device = device
        self._plain = torch.arange(max(1, nbytes // 4), dtype=torch.int32, device=device)
        self._number = 0
        self._wrong = 0
        self._source = self._target = torch.empty(0)

    def pack(self) -> None:
        """Make the next message, and room for it."""
        self._number += 1
        if self.path.sends:
            self._source = self._plain + self._number
        if self.path.receives:
            self._target = self.path.empty(self._plain.numel())

    def start(self) -> Wait:
        """Launch it."""
        return self.path.start(self._source, self._target)

    def check(self) -> None:
        """After the wait: count wrong elements and let go of the memory."""
        if self.path.receives:
            self._wrong += int((self._target != self._plain + self._number).sum())
        self._source = self._target = torch.empty(0)

    def carry(self) -> float:
        """One message from idle devices: this rank's seconds from launch to end, on the host."""
        self.pack()
        settle(self._device)
        start = time.perf_counter()
        self.start()()
        synchronize_current_stream(self._device)
        seconds = time.perf_counter() - start
        self.check()
        return seconds

    def wrong(self) -> int:
        """Of all messages, over all ranks, which all ask."""
        return total(self._wrong)
