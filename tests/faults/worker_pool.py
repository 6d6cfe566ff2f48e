"""Runs ranks in processes that are reused after a failure, and replaced if they died."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import resource
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ldt.testing import paced
from ldt.testing.pool import fork_context

__all__ = ["Ending", "Injected", "Worker", "WorkerPool"]

_EXIT_SECONDS = paced(10.0).total_seconds()


class Injected(NamedTuple):
    """A rank's report just before its fault: its time (CLOCK_MONOTONIC, s), and when to send SIGCONT, if at all."""

    time: float
    continue_after: float | None = None


@dataclass(frozen=True)
class Worker:
    """What a worker process knows: its rank, the port of the pool's store, and how to report its fault.

    With an ``address`` rank 0 hosts the store there.
    """

    rank: int
    port: int
    report_fault: Callable[[Injected], None]
    address: str = ""

    def store(self, world: str) -> PrefixStore:
        """Return a store for the world of that name, over a new connection."""
        host, hosts = self.address or "127.0.0.1", bool(self.address) and self.rank == 0
        store = TCPStore(host, self.port, None, hosts, timeout=paced(30), wait_for_workers=False)
        return PrefixStore(world, store)


@dataclass
class Ending:
    """How a run ended on one rank: with an ``answer``, with an ``exit_code``, or hung at ``stack``."""

    answer: Any = None
    exit_code: int | None = None
    stack: str | None = None


@dataclass
class _Process:
    process: Any
    pipe: Connection
    stack: Path


class WorkerPool:
    """A pool of up to ``size`` ranks. A context manager. Functions are pickled, so they must be importable by name.

    With ``places``, each rank is in its network namespace, and rank 0 hosts the store at ``address``.
    """

    def __init__(self, size: int, places: Sequence[Any] = (), address: str = "") -> None:
        self.size = size
        self._places = places
        self._address = address
        self._processes: dict[int, _Process] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="ldt-faults-")
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._context = fork_context()
        self.injected: list[Injected] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *unused: object) -> None:
        for entry in self._processes.values():
            with suppress(OSError):
                entry.pipe.send_bytes(b"")
        for rank in list(self._processes):
            self._remove(rank, _EXIT_SECONDS)
        self._folder.cleanup()

    def run(
        self,
        function: Callable[[Worker, Any], Any],
        orders: Sequence[Any],
        timeout: float,
        on_fault: Callable[[], None] = lambda: None,
    ) -> list[Ending]:
        """Call ``function(worker, orders[rank])`` on ranks that have an order; ``injected`` has their fault reports.

        Calls ``on_fault`` at each report. Ranks that do not answer within ``timeout`` seconds are killed; their endings
        show the stack.
        """
        self.injected = []
        for rank, order in enumerate(orders):
            if rank not in self._processes:
                self._processes[rank] = self._start(rank)
            self._processes[rank].pipe.send_bytes(pickle.dumps((function, order)))
        endings = {rank: Ending() for rank in range(len(orders))}
        waiting = {self._processes[rank].pipe: rank for rank in endings}
        deadline = time.monotonic() + paced(timeout).total_seconds()
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                reports = len(self.injected)
                if self._take(waiting[pipe], endings[waiting[pipe]]):
                    del waiting[pipe]
                if len(self.injected) > reports:
                    on_fault()
        for rank in waiting.values():
            endings[rank].stack = self._stack_of(rank)
        for rank in waiting.values():
            self._remove(rank, 0.0)
        return list(endings.values())

    def _take(self, rank: int, ending: Ending) -> bool:
        """Read a message of a rank. Returns whether it was the last."""
        entry = self._processes[rank]
        try:
            message = pickle.loads(entry.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            ending.exit_code = self._remove(rank, _EXIT_SECONDS)
            return True
        if not isinstance(message, Injected):
            ending.answer = message
            return True
        self.injected.append(message)
        if message.continue_after is not None:
            threading.Timer(message.continue_after, _continue, [entry.process.pid]).start()
        return False

    def _start(self, rank: int) -> _Process:
        local, remote = self._context.Pipe()
        stack = Path(self._folder.name) / f"stack-{rank}"
        place = self._places[rank] if self._places else None
        arguments = (remote, rank, self._store.port, str(stack), place, self._address)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        remote.close()
        return _Process(process, local, stack)

    def _remove(self, rank: int, timeout: float) -> int | None:
        """Return the exit code of a process that ends within ``timeout`` seconds; None if it must be killed."""
        entry = self._processes.pop(rank)
        entry.process.join(timeout)
        code: int | None = entry.process.exitcode
        entry.process.kill()
        entry.process.join()
        entry.pipe.close()
        return code

    def _stack_of(self, rank: int) -> str:
        entry = self._processes[rank]
        resource.prlimit(entry.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        for number in (signal.SIGCONT, signal.SIGUSR1):
            os.kill(entry.process.pid, number)
        time.sleep(0.5)
        return entry.stack.read_text()


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _serve(pipe: Connection, rank: int, port: int, stack_file: str, place: Any, address: str) -> None:
    """Serve orders in a worker process."""
    if place is not None:
        place.enter()
    faulthandler.register(signal.SIGUSR1, file=Path(stack_file).open("w"), all_threads=True)  # noqa: SIM115
    torch.set_num_threads(1)
    worker = Worker(rank, port, lambda injected: pipe.send_bytes(pickle.dumps(injected)), address)
    with suppress(EOFError):
        while order := pipe.recv_bytes():
            function, argument = pickle.loads(order)
            _freeze_imported_objects()
            try:
                answer = function(worker, argument)
            except Exception:  # SystemExit propagates: it is a fault of its own
                answer = traceback.format_exc()
            pipe.send_bytes(pickle.dumps(answer))


def _freeze_imported_objects() -> None:
    """Exclude torch's modules from garbage collection once they are imported."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
