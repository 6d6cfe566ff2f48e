"""How far the host may run ahead of a device with streams."""

from __future__ import annotations

import time
from collections import deque

import torch

from ldt.runtime.common.device import current_stream
from ldt.runtime.health.watchdog import Watchdog

__all__ = ["AHEAD", "RunAheadLimit"]

# Compute actions. Enough that the device never waits for a host that is on time; what is sent and not yet gone is
# held until the host gets to know that it is, so memory grows with this number.
AHEAD = 4
_POLL_SECONDS = 5e-5


class RunAheadLimit:
    """Holds the host back so that it launches no action before the one that is ``AHEAD`` actions earlier is done.

    That one needs nothing of what comes later in the row, so this never waits for itself. On the CPU, where actions
    are done when they return, it does nothing.
    """

    def __init__(self, device: torch.device, watchdog: Watchdog) -> None:
        self._device = device
        self._watchdog = watchdog
        self._ends: deque[torch.Event] = deque()

    def mark(self) -> None:
        """An action has been launched on the current stream."""
        if self._device.type == "cpu":
            return
        end = torch.Event(self._device)
        end.record(current_stream(self._device))
        self._ends.append(end)

    def keep(self) -> None:
        """Wait until another one may be launched. Raises RemoteStageError if another rank has failed."""
        while len(self._ends) >= AHEAD:
            while not self._ends[0].query():
                self._watchdog.check()
                time.sleep(_POLL_SECONDS)
            self._ends.popleft()
