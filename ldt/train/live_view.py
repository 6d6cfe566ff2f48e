"""Shows in the terminal what a long run does, on the edge: from heartbeats and statistics that are there anyway."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

import torch

from ldt.plan import Costs
from ldt.runtime.common.device import current_stream
from ldt.runtime.execution.scalars import scalars
from ldt.runtime.execution.step_result import StepResult
from ldt.runtime.health.progress import RankStatus
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.pipeline import Pipeline
from ldt.train.live_table import BusyShares, LinkUse, Snapshot, line_of, table_of

__all__ = ["LiveView"]

logger = logging.getLogger(__name__)

_KEPT_STEPS = 20  # of which rates are means
_REFRESH_SECONDS = 1.0
_LOG_SECONDS = 30.0
_JOIN_SECONDS = 2.0


class LiveView:
    """Shows what a run does: each rank's action, the use of links, bubble, loss, step time and tokens per second.

    A context manager. It shows on rank 0, and does nothing on other ranks: use it there or not. It makes no collective
    call and sends nothing in a step: a thread draws once a second what heartbeats say of all ranks, and what ``update``
    was given. Where standard output is no terminal, or ``rich`` is not installed, it logs a line each 30 s at level
    INFO. What fails in it is logged and ends it, never the training.

    Args:
        pipeline: The pipeline of this rank, also under ``ldt.Leader``.
        costs: Those of ``measure_costs``, or others with the bandwidth of the links, to show what share is in use.
        console: A console of ``rich`` to draw on, instead of standard output.
    """

    def __init__(self, pipeline: Pipeline, costs: Costs | None = None, *, console: Any = None) -> None:
        mesh = pipeline.mesh
        self._mesh = mesh
        self._steps: deque[_Step] = deque(maxlen=_KEPT_STEPS)
        self._count = 0
        self._loss: _Loss | None = None
        self._shown_loss: float | None = None
        self._statuses: dict[int, RankStatus] = {}
        self._busy = BusyShares()
        self._bandwidths = {} if costs is None else _bandwidths(mesh, costs)
        self._last = time.perf_counter()
        self._live: Any = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if mesh.rank == 0:
            self._open(console)

    def update(self, result: StepResult, *, tokens: int | None = None) -> None:
        """Give it a step that has ended, and how many tokens it had over all replicas. Does not wait for the device."""
        if self._thread is None or self._ended.is_set():
            return
        try:
            now = time.perf_counter()
            figures = scalars(result.stats)
            self._steps.append(_Step(now - self._last, figures, tokens))
            self._last = now
            self._count += 1
            if result.loss is not None and (self._loss is None or self._loss.is_ready):
                self._take_loss()
                self._loss = _Loss(result.loss)
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Stop. Idempotent."""
        self._ended.set()
        atexit.unregister(self.close)
        heartbeats = self._mesh.detector.heartbeats
        if heartbeats.on_look == self._look:  # not of a view that was opened since
            heartbeats.on_look = None
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
            self._thread = None
        if self._live is not None:
            with suppress(Exception):
                self._live.stop()
            self._live = None

    def __enter__(self) -> LiveView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- internal --------------------------------------------------------------------------------------------

    def _open(self, console: Any) -> None:
        self._mesh.detector.heartbeats.on_look = self._look
        if console is not None or sys.stdout.isatty():
            try:
                from rich.live import Live

                self._live = Live(console=console, auto_refresh=False)
                self._live.start()
                _opened.add(self)
            except ImportError:
                logger.warning(
                    "the live view needs rich: pip install 'ldt-torch[live]'; it logs lines instead"
                )
        self._thread = threading.Thread(target=self._run, name="ldt-live", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # rich has hidden the cursor

    def _look(self, statuses: dict[int, RankStatus]) -> None:
        """Called by the watchdog's thread."""
        self._statuses = statuses

    def _run(self) -> None:
        try:
            logs = self._live is None
            while not self._ended.wait(_LOG_SECONDS if logs else _REFRESH_SECONDS):
                self._show()
            self._show()
        except Exception as error:
            self._fail(error)

    def _show(self) -> None:
        seen = self._snapshot()
        if self._live is None:
            logger.info("%s", line_of(seen))
        else:
            self._live.update(table_of(seen, self._mesh.rank_info), refresh=True)

    def _snapshot(self) -> Snapshot:
        self._take_loss()
        statuses, steps = self._statuses, list(self._steps)
        self._busy.add(statuses)
        if not steps:
            return Snapshot(0, statuses=statuses, busy=self._busy.shares())
        seconds = sum(step.seconds for step in steps)
        tokens = [step.tokens for step in steps if step.tokens is not None]
        return Snapshot(
            self._count,
            self._shown_loss,
            seconds / len(steps),
            sum(tokens) / seconds if tokens else None,
            steps[-1].figures["step/bubble"],
            self._links(steps, seconds),
            statuses,
            self._busy.shares(),
        )

    def _links(self, steps: list[_Step], seconds: float) -> dict[str, LinkUse]:
        """This replica's traffic, times the number of edge replicas, which all have as many microbatches."""
        found = {}
        for name in (name for name in steps[-1].figures if name.endswith("/bytes")):
            sent = sum(step.figures.get(name, 0.0) for step in steps)
            rate = sent * self._mesh.topology.edge_dp / seconds
            link = name.split("/")[1]
            bandwidth = self._bandwidths.get(link)
            found[link.replace("_to_", " to ")] = LinkUse(
                rate, None if bandwidth is None else rate / bandwidth
            )
        return found

    def _take_loss(self) -> None:
        loss = self._loss
        if loss is not None and loss.is_ready:
            self._shown_loss = float(loss.value)

    def _fail(self, error: Exception) -> None:
        self._ended.set()
        logger.warning("the live view has ended: %s: %s", type(error).__name__, error)


class _Step(NamedTuple):
    seconds: float
    figures: dict[str, float]
    tokens: int | None


class _Loss:
    """A loss on its way from a device to the host, which does not wait for it."""

    def __init__(self, loss: torch.Tensor) -> None:
        loss = loss.detach()
        self._event: torch.Event | None = None
        if loss.device.type == "cpu":
            self.value = loss
            return
        self.value = torch.empty_like(loss, device="cpu", pin_memory=True)
        self.value.copy_(loss, non_blocking=True)
        self._event = torch.Event(loss.device)
        self._event.record(current_stream(loss.device))

    @property
    def is_ready(self) -> bool:
        return self._event is None or self._event.query()


def _bandwidths(mesh: Mesh, costs: Costs) -> dict[str, float]:
    """Bytes per second by link between sites, as ``scalars`` names them."""
    topology = mesh.topology
    found: dict[str, float] = {}
    for channel in topology.channels:
        source, target = channel.source.stage, channel.target.stage
        seconds = replace(costs, bytes=1).occupancy(channel.hop, channel.direction, source < target)
        if not topology.is_local(channel) and seconds > 0:
            link = f"{topology.sites[source]}_to_{topology.sites[target]}"
            found[link] = min(found.get(link, math.inf), 1 / seconds)
    return found


# rich has taken the place of standard output and error. A process that is forked while it draws, such as a worker of
# a DataLoader, must not print through it.
_opened: weakref.WeakSet[LiveView] = weakref.WeakSet()


def _restore_output() -> None:
    for view in list(_opened):
        live, view._live = view._live, None
        if live is not None:
            for name in ("stdout", "stderr"):
                redirected = getattr(sys, name)
                setattr(sys, name, getattr(redirected, "rich_proxied_file", redirected))


os.register_at_fork(after_in_child=_restore_output)
