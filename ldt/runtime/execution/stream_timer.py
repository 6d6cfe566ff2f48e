"""Times what a stream does, by its own events."""

from __future__ import annotations

import torch

from ldt.runtime.common.device import current_stream, synchronize_current_stream
from ldt.runtime.execution.recorder import Entry

__all__ = ["StreamTimer"]


class StreamTimer:
    """Times of actions on the current stream of ``device``, which runs them as in any step: behind the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[int, tuple[Entry, torch.Event, torch.Event]] = {}

    def begin(self, entry: Entry) -> None:
        """What is launched now belongs to ``entry``. Again after a wait: what was before does not count."""
        begin, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        begin.record(current_stream(self._device))
        self._spans[id(entry)] = entry, begin, end

    def end(self, entry: Entry) -> None:
        _, _, end = self._spans[id(entry)]
        end.record(current_stream(self._device))

    def resolve(self) -> None:
        """Wait for the stream, and give each entry the seconds that it took there, with nothing waited."""
        synchronize_current_stream(self._device)
        for entry, begin, end in self._spans.values():
            entry.end = entry.start + begin.elapsed_time(end) / 1e3
            entry.waited = 0.0
        self._spans.clear()
