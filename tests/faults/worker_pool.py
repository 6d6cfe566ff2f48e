"""Processes that each play one rank, stay after a failure they survive, and are replaced where they do not."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ldt.testing import paced

__all__ = ["Crew", "Ending", "Injected", "Seat"]

_EXIT_SECONDS = paced(10.0).total_seconds()


class Injected(NamedTuple):
    """What a rank tells just before its fault: when (CLOCK_MONOTONIC, s), and when to send it SIGCONT, if at all."""

    time: float
    continue_after: float | None = None


@dataclass(frozen=True)
class Seat:
    """What a process knows of itself: its rank, the port of the crew's store, and a way to tell of its fault."""

    rank: int
    port: int
    tell: Callable[[Injected], None]

    def store(self, world: str) -> PrefixStore:
        """A store for the world of that name, over a connection of its own."""
        limit = paced(30)
        return PrefixStore(world, TCPStore("127.0.0.1", self.port, None, False, timeout=limit))


@dataclass
class Ending:
    """How a run ended on one rank: with an ``answer``, an ``exit_code``, or not at all, then ``stack`` says where."""

    answer: Any = None
    exit_code: int | None = None
    stack: str | None = None


@dataclass
class _Member:
    process: Any
    pipe: Connection
    stack: Path


class Crew:
    """Up to ``size`` ranks. A context manager. Functions are run by name, called with a Seat and their argument."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._members: dict[int, _Member] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="ldt-faults-")
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch._dynamo", "ldt.runtime", "ldt.testing"])
        self.injected: list[Injected] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *unused: object) -> None:
        for member in self._members.values():
            with suppress(OSError):
                member.pipe.send_bytes(b"")
        for rank in list(self._members):
            self._remove(rank, _EXIT_SECONDS)
        self._folder.cleanup()

    def run(
        self, function: Callable[[Seat, Any], Any], orders: Sequence[Any], timeout: float
    ) -> list[Ending]:
        """Call ``function(seat, orders[rank])`` on the ranks that have an order; ``injected`` is what they told.

        Ranks that have not answered after ``timeout`` seconds are killed; their endings show where they stood.
        """
        self.injected = []
        for rank, order in enumerate(orders):
            if rank not in self._members:
                self._members[rank] = self._start(rank)
            self._members[rank].pipe.send_bytes(pickle.dumps((function, order)))
        endings = {rank: Ending() for rank in range(len(orders))}
        waiting = {self._members[rank].pipe: rank for rank in endings}
        deadline = time.monotonic() + paced(timeout).total_seconds()
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                if self._take(waiting[pipe], endings[waiting[pipe]]):
                    del waiting[pipe]
        for rank in waiting.values():
            endings[rank].stack = self._stack_of(rank)
        for rank in waiting.values():
            self._remove(rank, 0.0)
        return list(endings.values())

    def _take(self, rank: int, ending: Ending) -> bool:
        """Read what a rank says. Whether it was its last word."""
        member = self._members[rank]
        try:
            message = pickle.loads(member.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            ending.exit_code = self._remove(rank, _EXIT_SECONDS)
            return True
        if not isinstance(message, Injected):
            ending.answer = message
            return True
        self.injected.append(message)
        if message.continue_after is not None:
            threading.Timer(message.continue_after, _continue, [member.process.pid]).start()
        return False

    def _start(self, rank: int) -> _Member:
        mine, theirs = self._context.Pipe()
        stack = Path(self._folder.name) / f"stack-{rank}"
        arguments = (theirs, rank, self._store.port, str(stack))
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        with _without_plugins():
            process.start()
        theirs.close()
        return _Member(process, mine, stack)

    def _remove(self, rank: int, patience: float) -> int | None:
        """The exit code of a process that ends by itself in so many seconds; None where it must be killed."""
        member = self._members.pop(rank)
        member.process.join(patience)
        code: int | None = member.process.exitcode
        member.process.kill()
        member.process.join()
        member.pipe.close()
        return code

    def _stack_of(self, rank: int) -> str:
        member = self._members[rank]
        resource.prlimit(member.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        for number in (signal.SIGCONT, signal.SIGUSR1):
            os.kill(member.process.pid, number)
        time.sleep(0.5)
        return member.stack.read_text()


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _serve(pipe: Connection, rank: int, port: int, stack_file: str) -> None:
    """The life of a process."""
    faulthandler.register(signal.SIGUSR1, file=Path(stack_file).open("w"), all_threads=True)  # noqa: SIM115
    torch.set_num_threads(1)
    seat = Seat(rank, port, lambda injected: pipe.send_bytes(pickle.dumps(injected)))
    with suppress(EOFError):
        while order := pipe.recv_bytes():
            function, argument = pickle.loads(order)
            _spare_the_collector()
            try:
                answer = function(seat, argument)
            except Exception:  # a SystemExit goes on: it is a fault of its own
                answer = traceback.format_exc()
            pipe.send_bytes(pickle.dumps(answer))


def _spare_the_collector() -> None:
    """Of walking through torch's modules each time, once they are imported."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


@contextmanager
def _without_plugins() -> Iterator[None]:
    """Before the server of the processes imports torch: device backends that are installed are not loaded."""
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    before = os.environ.get(name)
    os.environ.setdefault(name, "0")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
