"""Limits how far the host runs ahead of a device with streams."""

from __future__ import annotations

import time
from collections import deque

import torch

from ldt.runtime.common.device import current_stream
from ldt.runtime.health.watchdog import Watchdog

__all__ = ["MAX_AHEAD", "RunAheadLimit"]

# Compute actions. Enough that the device does not wait for a host that keeps up. Memory grows with this number: a
# tensor is held until the host sees that its send has completed.
MAX_AHEAD = 4
_POLL_SECONDS = 5e-5


class RunAheadLimit:
    """Blocks the host until the compute action launched ``MAX_AHEAD`` actions earlier is done.

    That action depends on nothing later in the row, so this cannot deadlock. On the CPU, where actions are done when
    they return, it does nothing.
    """

    def __init__(self, device: torch.device, watchdog: Watchdog) -> None:
        self._device = device
        self._watchdog = watchdog
        self._ends: deque[torch.Event] = deque()

    def record(self) -> None:
        """Record that an action has been launched on the current stream."""
        if self._device.type == "cpu":
            return
        end = torch.Event(self._device)
        end.record(current_stream(self._device))
        self._ends.append(end)

    def wait(self) -> None:
        """Wait until another action may be launched. Raises RemoteStageError if another rank has failed."""
        while len(self._ends) >= MAX_AHEAD:
            while not self._ends[0].query():
                self._watchdog.check()
                time.sleep(_POLL_SECONDS)
            self._ends.popleft()
