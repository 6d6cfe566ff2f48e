"""Runs long local work on every rank and raises on all if it fails on one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from ldt.errors import LdtError
from ldt.runtime.common.device import synchronize_current_stream
from ldt.runtime.common.redact import unredacted
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.step.call import all_agree

__all__ = ["run_on_all_ranks"]

_MAX_PAUSE = 2.0  # seconds
_PAUSE_SHARE = 0.1  # of the time so far, by which ranks may wait longer than the slowest one works


def run_on_all_ranks(mesh: Mesh, call: str, work: Callable[[], None]) -> None:
    """Run ``work`` on every rank; if it raises on one, all raise. A collective call.

    ``work`` runs in a thread on the device's default stream, behind the launches on the current one. Meanwhile the
    ranks poll each other, so that no transfer lasts as long as a slow disk. ``work`` must not wait for another rank:
    a failure elsewhere or Ctrl-C ends this call only after ``work`` has ended here, so that no reading or writing
    continues in the background.
    """
    worker = _Worker(work, mesh.device)
    start = time.monotonic()
    done = False
    try:
        while not done:
            pause = min(_MAX_PAUSE, 0.01 + _PAUSE_SHARE * (time.monotonic() - start))
            with mesh.collective(call):
                done = all(mesh.control.all_gather(worker.ended(pause)))
    finally:
        worker.ended(None)
    all_agree(mesh, call, worker.error, {}, phase="finish")


class _Worker:
    """A thread that runs ``work``; ``error`` is the exception that it raised."""

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        self.error: Exception | None = None
        self._work = work
        self._device = device
        synchronize_current_stream(device)
        self._thread = threading.Thread(target=self._run, name="ldt-checkpoint", daemon=True)
        self._thread.start()

    def ended(self, seconds: float | None) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._device.type != "cpu":
                torch.get_device_module(self._device).set_device(self._device)
            with torch.no_grad():
                self._work()
            synchronize_current_stream(self._device)
        except Exception as error:
            self.error = error
        except BaseException as error:  # would be lost in a thread
            self.error = LdtError(unredacted(error)[0])
