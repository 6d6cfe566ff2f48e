"""Work that each rank does for itself and that all must have done: long, and without hanging for a rank that fails."""

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

__all__ = ["together"]

_LONGEST_PAUSE = 2.0  # seconds
_SHARE_OF_TIME = 0.1  # that ranks may wait longer than the slowest one works


def together(mesh: Mesh, call: str, work: Callable[[], None]) -> None:
    """Do ``work`` on every rank; if it raises on one, all raise. A collective call.

    ``work`` runs in a thread, on the device's default stream, behind what was launched on the current one. Meanwhile
    ranks ask each other whether they are done, so no transfer lasts as long as a disk may take. ``work`` must not wait
    for another rank: whatever ends this call, a failure elsewhere or Ctrl-C, ends it once ``work`` has ended here, so
    that nothing goes on reading or writing behind what comes next.
    """
    worker = _Worker(work, mesh.device)
    start = time.monotonic()
    done = False
    try:
        while not done:
            pause = min(_LONGEST_PAUSE, 0.01 + _SHARE_OF_TIME * (time.monotonic() - start))
            with mesh.collective(call):
                done = all(mesh.control.all_gather(worker.ended(pause)))
    finally:
        worker.ended(None)
    all_agree(mesh, call, worker.error, {}, phase="finish")


class _Worker:
    """A thread that does ``work``; ``error`` is what it raised."""

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
        except BaseException as error:  # nobody would see it in a thread
            self.error = LdtError(unredacted(error)[0])
