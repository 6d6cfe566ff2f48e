"""Injects a fault into this process at its point."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

import ldt
from faults.corruption import CORRUPTIONS
from faults.fault import Fault, FaultKind, LinkFaultKind, Point
from faults.leak_check import Connection, borrowed_socket, reset, tcp_connections
from faults.worker_pool import Injected, Worker
from ldt.runtime.execution import executor
from ldt.testing import paced

__all__ = ["EXIT_CODE", "HEARTBEAT_SECONDS", "PAUSE_SECONDS", "STOP_SECONDS", "InjectedError", "Trap"]

HEARTBEAT_SECONDS = paced(2.0).total_seconds()  # the job's heartbeat_timeout
PAUSE_SECONDS = 1.2
STOP_SECONDS = HEARTBEAT_SECONDS + 3.0
EXIT_CODE = 3
_SLOW_SECONDS = 0.3
_SLOW_EVERY = 5  # actions
_DISK_BYTES = 64
_CUT_SECONDS = 0.1


class InjectedError(Exception):
    """The exception that is injected."""


class Trap:
    """Follows this process through the job and injects the fault at its point. Without a fault it does nothing."""

    def __init__(self, fault: Fault | None, worker: Worker) -> None:
        self._fault = fault if fault is not None and fault.rank == worker.rank else None
        self._worker = worker
        self._step = -1
        self._count = 0
        self._mesh: Callable[[], ldt.Mesh | None] = lambda: None
        self._foreign: set[int] = set()
        self._traffic: list[dict[int, int]] = []
        self.watch_actions()

    def watch_actions(self) -> None:
        """Make every action of a plan report its begin and end to this trap."""
        for kind, method in executor._METHODS.items():
            plain = getattr(method, "plain", method)
            executor._METHODS[kind] = _watched(plain, self)

    def before_connect(self) -> None:
        """Record the existing connections, which are not the mesh's."""
        self._foreign = {connection.fd for connection in tcp_connections()}

    def connected(self, mesh: ldt.Mesh) -> None:
        self._mesh = weakref.ref(mesh)

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._step, self._count = step, 0
        if self._fault is not None and self._fault.kind in ("drop", "reset"):
            found = self._connections() if self._fault.kind == "drop" else _to_other_site()
            self._traffic.append({one.fd: one.sent + one.received for one in found})

    def reach(self, point: Point) -> None:
        """Reach a point of the job."""
        fault = self._fault
        if fault is None or (self._step, point) != (fault.step, fault.point):
            return
        self._count += 1
        if fault.kind == "slow":
            if self._count % _SLOW_EVERY == 1:
                self._strike(fault)
        elif self._count - 1 == fault.index:
            delayed = point in ("connect", "save") and fault.kind != "disk_full"
            if delayed and fault.detail != "sys.exit":  # which ends only the thread that calls it
                threading.Timer(fault.delay, self._strike, [fault]).start()
            else:
                self._strike(fault)

    def release(self) -> None:
        """Free the disk."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def _strike(self, fault: Fault) -> None:
        continue_after = {"pause": PAUSE_SECONDS, "stop": STOP_SECONDS}.get(fault.kind)
        self._worker.report_fault(Injected(time.monotonic(), continue_after))
        _STRIKES[fault.kind](self, fault)

    # -- one method per kind ---------------------------------------------------------------------------------

    def _raise(self, fault: Fault) -> None:
        raise InjectedError("injected") if fault.kind == "exception" else torch.OutOfMemoryError("injected")

    def _kill(self, fault: Fault) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _exit(self, fault: Fault) -> None:
        sys.exit(EXIT_CODE) if fault.detail == "sys.exit" else os._exit(EXIT_CODE)

    def _stop(self, fault: Fault) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)  # the pool sends SIGCONT

    def _sleep(self, fault: Fault) -> None:
        time.sleep(_SLOW_SECONDS)

    def _drop(self, fault: Fault) -> None:
        """Shut down a connection that was used in the step before, so the job needs it."""
        with borrowed_socket(random.Random(fault.seed).choice(self._used())) as sock:
            sock.shutdown(socket.SHUT_RDWR)

    def _used(self) -> list[int]:
        """Return the connections that were used in the step before."""
        before, after = self._traffic[-2:]
        return sorted(fd for fd in after.keys() & before.keys() if after[fd] > before[fd])

    def _cut(self, fault: Fault) -> None:
        """Wait until the harness has cut the link."""
        time.sleep(_CUT_SECONDS)

    def _reset(self, fault: Fault) -> None:
        """Reset a connection to the other site, after the first steps one that was used in the step before."""
        among = sorted(found.fd for found in _to_other_site())
        if len(self._traffic) > 1:
            among = self._used()
        with borrowed_socket(random.Random(fault.seed).choice(among)) as sock:
            reset(sock)

    def _corrupt(self, fault: Fault) -> None:
        mesh = self._mesh()
        assert mesh is not None
        CORRUPTIONS[fault.detail](mesh)

    def _fill_disk(self, fault: Fault) -> None:
        """Limit this process's file size: a write beyond it raises OSError, as Python ignores SIGXFSZ."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (_DISK_BYTES, resource.RLIM_INFINITY))

    def _connections(self) -> list[Connection]:
        """Return the mesh's connections, except those to the store."""
        return [
            found
            for found in tcp_connections()
            if found.fd not in self._foreign and found.peer_port != self._worker.port
        ]


_STRIKES: dict[FaultKind | LinkFaultKind, Callable[[Trap, Fault], None]] = {
    "exception": Trap._raise,
    "memory": Trap._raise,
    "kill": Trap._kill,
    "exit": Trap._exit,
    "stop": Trap._stop,
    "pause": Trap._stop,
    "slow": Trap._sleep,
    "drop": Trap._drop,
    "corrupt": Trap._corrupt,
    "disk_full": Trap._fill_disk,
    "outage": Trap._cut,
    "long_outage": Trap._cut,
    "reset": Trap._reset,
}


def _to_other_site() -> list[Connection]:
    return [found for found in tcp_connections() if found.crosses]


def _watched(plain: Callable[..., None], trap: Trap) -> Callable[..., None]:
    def method(*arguments: Any) -> None:
        trap.reach("action")
        plain(*arguments)
        trap.reach("action")

    method.plain = plain  # type: ignore[attr-defined]
    return method
