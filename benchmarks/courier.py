"""Sends messages over a path. Each has different data, so that late, early and stale data are all detected.

As in a pipeline, the receive is posted before the message is sent: ``ready``, ``start``, ``wait``, ``check``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from bounces import Bounces
from clock import Passage, meet, settle, total

from ldt._C import Lane
from ldt.runtime.common.device import synchronize_current_stream

__all__ = ["Courier", "Path", "Wait"]

Wait = Callable[[], object]


@dataclass(frozen=True)
class Path:
    """A path for messages from one rank to others, and this rank's part in it.

    ``send(source)`` and ``receive(target)`` launch a transfer and return a function that waits for it. ``send`` is None
    on ranks that do not send, ``receive`` on ranks that do not receive. ``empty(n)`` allocates n int32 elements to
    receive into. ``receiving_lanes`` are the lanes that this rank receives on.
    """

    name: str
    send: Callable[[torch.Tensor], Wait] | None
    receive: Callable[[torch.Tensor], Wait] | None
    empty: Callable[[int], torch.Tensor]
    receiving_lanes: Sequence[Lane] = ()


class Courier:
    """Sends messages of one size over one path and counts wrong elements received on this rank."""

    def __init__(self, path: Path, nbytes: int, device: torch.device) -> None:
        self.path = path
        self._device = device
        self._plain = torch.arange(max(1, nbytes // 4), dtype=torch.int32, device=device)
        self._number = 0
        self._wrong = 0
        self._source = self._target = torch.empty(0)
        self._waits: list[Wait] = []
        self._bounces = Bounces(path.receiving_lanes)

    # -- one message, step by step -------------------------------------------------------------------------------

    def pack(self) -> None:
        """Create the next message, and memory for its receive."""
        self._bounces.start()
        self._number += 1
        if self.path.send is not None:
            self._source = self._plain + self._number
        if self.path.receive is not None:
            self._target = self.path.empty(self._plain.numel())

    def post(self) -> None:
        """Launch the receive."""
        if self.path.receive is not None:
            self._waits.append(self.path.receive(self._target))

    def start(self) -> None:
        """Launch the send."""
        if self.path.send is not None:
            self._waits.append(self.path.send(self._source))

    def wait(self) -> None:
        for wait in self._waits:
            wait()
        self._waits.clear()

    def check(self) -> None:
        """After the wait: count wrong elements and release the memory."""
        if self.path.receive is not None:
            self._wrong += int((self._target != self._plain + self._number).sum())
        self._source = self._target = torch.empty(0)
        self._bounces.stop()

    # -- several steps at once -----------------------------------------------------------------------------------

    def ready(self) -> None:
        """Pack, post the receive on an idle device, and synchronize the ranks: everything before the start.

        A posted receive may keep the device busy until its message arrives, so nothing may synchronize the device
        between here and the wait.
        """
        self.pack()
        settle(self._device)
        self.post()
        meet()

    def connect(self) -> None:
        """Send a first message without synchronizing the ranks.

        NCCL connects at first use, which blocks the host until the peer joins. A rank that does both therefore sends
        first.
        """
        self.pack()
        self.start()
        self.post()
        self.wait()
        synchronize_current_stream(self._device)
        self.check()

    def carry(self) -> Passage:
        """Send one message from idle devices into posted memory."""
        self.ready()
        start = time.perf_counter()
        self.start()
        self.wait()
        synchronize_current_stream(self._device)
        end = time.perf_counter()
        self.check()
        return Passage.of(
            start if self.path.send is not None else None, end if self.path.receive is not None else None
        )

    # -- over all messages and ranks; collective calls ------------------------------------------------------------

    def wrong(self) -> int:
        """Return the number of wrong elements."""
        return total(self._wrong)

    def bounced(self) -> float | None:
        """Return the share of messages that went through bounce slots; None without lanes."""
        return self._bounces.share()
