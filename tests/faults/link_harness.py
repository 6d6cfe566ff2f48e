"""Runs the job in two network namespaces, as of two sites, with a fault of the link between them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from faults.fault import Fault
from faults.harness import Harness
from faults.job import Order, Report, train
from faults.link_fault import LINK_SHAPES, draw_link
from faults.link_verdict import link_complaints
from faults.worker_pool import Ending, WorkerPool
from ldt.topology import Topology

__all__ = ["LinkHarness"]

_RATE, _LATENCY = 12.5e6, 0.01  # bytes/s, seconds one way
_HANG_SECONDS = 60.0  # beyond thrice the outage


class LinkHarness(Harness):
    """Runs many seeds over one link. Needs ``wan_link`` of the benchmarks on the path, and root."""

    def __init__(self) -> None:
        from wan_link import Settings, wide_area_link

        self._undo = ExitStack()
        self._link = self._undo.enter_context(wide_area_link(Settings(_RATE, _LATENCY)))
        super().__init__()

    def __exit__(self, *unused: object) -> None:
        super().__exit__()
        self._undo.close()

    def _make_pool(self) -> WorkerPool:
        from wan_link import ADDRESSES

        size = max(shape.world_size for shape in LINK_SHAPES)
        places = [self._link.places[0], *[self._link.places[1]] * (size - 1)]
        return WorkerPool(size, places, ADDRESSES[0])

    def draw(self, seed: int) -> Fault:
        return draw_link(seed)

    def complaints(self, fault: Fault, endings: list[Ending], reference: list[Report]) -> Iterable[str]:
        return link_complaints(fault, self._pool.injected, endings, reference)

    def _job(self, topology: Topology, folder: Path, fault: Fault | None = None) -> list[Ending]:
        self._worlds += 1
        order = Order(f"world-{self._worlds}", topology, folder, fault, fault.outage if fault else 0.0)
        orders = [order] * topology.world_size
        if fault is None or not fault.seconds:
            return self._pool.run(train, orders, _HANG_SECONDS)
        back = threading.Timer(fault.seconds, self._cut, [0])

        def cut() -> None:
            self._cut(1)
            back.start()

        try:
            return self._pool.run(train, orders, _HANG_SECONDS + 3 * fault.seconds, cut)
        finally:
            back.cancel()
            self._cut(0)

    def _cut(self, cut: int) -> None:
        for direction in (0, 1):
            self._link.set(direction, cut=cut)
