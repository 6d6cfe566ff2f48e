"""Times actions on a stream with its own events."""

from __future__ import annotations

import time

import torch

from ldt.runtime.common.device import current_stream, synchronize_current_stream
from ldt.runtime.execution.recorder import Entry

__all__ = ["StreamTimer"]


class StreamTimer:
    """Times actions on the current stream of ``device``. The stream runs behind the host, as in any step.

    With ``moments`` it also says when they began there. For this it waits for the stream once, when it is made.
    """

    def __init__(self, device: torch.device, moments: bool = False) -> None:
        self._device = device
        self._zero: tuple[torch.Event, float] | None = None
        if moments:
            event = torch.Event(device, enable_timing=True)
            event.record(current_stream(device))
            synchronize_current_stream(device)  # it may be late if processes share the device
            self._zero = event, time.time()
        self._spans: dict[int, tuple[Entry, torch.Event, torch.Event]] = {}

    @property
    def moments(self) -> bool:
        return self._zero is not None

    def begin(self, entry: Entry) -> None:
        """Start timing ``entry``. Called again after a wait, which drops the time before it."""
        begin, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        begin.record(current_stream(self._device))
        self._spans[id(entry)] = entry, begin, end

    def end(self, entry: Entry) -> None:
        _, _, end = self._spans[id(entry)]
        end.record(current_stream(self._device))

    def resolve(self) -> None:
        """Wait for the stream, then set each entry's duration to its time there and ``waited`` to 0."""
        synchronize_current_stream(self._device)
        for entry, begin, end in self._spans.values():
            if self._zero is not None:
                event, moment = self._zero
                entry.start = moment + event.elapsed_time(begin) / 1e3
            entry.end = entry.start + begin.elapsed_time(end) / 1e3
            entry.waited = 0.0
        self._spans.clear()
