"""A pool of processes that run functions together as the ranks of one gloo world."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ldt._torch_private import TCPStore
from ldt.testing.slowness import allowed, slowness_at_start

__all__ = ["RankError", "RankPool", "fork_context"]

DEADLINE = 30.0
_START_SECONDS = 60.0
_END_SECONDS = 10.0
_RENDEZVOUS = timedelta(minutes=10)  # long, because the pool itself kills late processes


class RankError(AssertionError):
    """A function failed on a rank of a pool or timed out. The text has every rank's traceback."""


class RankPool:
    """Persistent processes that form one gloo world and run functions together. A context manager.

    A server that has imported torch once starts them at first use and after a failure. Functions are sent by name: they
    must be at the top level of an importable module.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._stacks: list[Path] = []
        self._store: TCPStore | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ldt-ranks-")

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        timeout: float = DEADLINE,
    ) -> list[Any]:
        """Call ``function(*args)`` on each of ``ranks`` (default: all) and return the results in that order.

        Raises RankError with the tracebacks of the ranks it failed on. If not all have ended after ``timeout``
        seconds (of an idle machine), the pool is killed and the error has the stack of each late rank.
        """
        if not self._processes:
            self._start()
        ranks = range(self.size) if ranks is None else ranks
        code = sys.modules[function.__module__].__file__
        request = pickle.dumps((function.__module__, function.__qualname__, code, args))
        for rank in ranks:
            self._pipes[rank].send_bytes(request)
        answers = self._collect(list(ranks), timeout)
        failures = [text for good, text in answers.values() if not good]
        if failures:
            self.kill()
            raise RankError("\n\n".join(failures))
        return [answers[rank][1] for rank in ranks]

    def kill(self) -> None:
        """Kill all processes; the next run starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None

    def close(self) -> None:
        """Ask the processes to end, and kill those that do not. The pool can be used again."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(b"")
        late = self._join(_END_SECONDS) and self._join(allowed(_END_SECONDS))
        self.kill()
        if late:
            raise RankError(f"ranks {late} did not end when they were asked to")

    def _join(self, seconds: float) -> list[int]:
        """Wait for the processes to end. Returns the ranks of those that have not."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [rank for rank, process in enumerate(self._processes) if process.exitcode is None]

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._folder.cleanup()

    @property
    def processes(self) -> list[Any]:
        """The ``multiprocessing`` processes, by rank."""
        return self._processes

    def _start(self) -> None:
        context = fork_context()
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._stacks = [Path(self._folder.name) / f"stack-{rank}" for rank in range(self.size)]
        for rank in range(self.size):
            own_end, rank_end = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank_end, rank, self.size, self._store.port, str(self._stacks[rank])),
                daemon=True,
            )
            process.start()
            rank_end.close()
            self._processes.append(process)
            self._pipes.append(own_end)
        self._collect(list(range(self.size)), _START_SECONDS)

    def _collect(self, ranks: list[int], timeout: float) -> dict[int, tuple[bool, Any]]:
        """Return each rank's (succeeded, result or error text)."""
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {self._pipes[rank]: rank for rank in ranks}
        start, limit = time.monotonic(), timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, start + limit - time.monotonic()))
            if not ready:
                limit, before = max(limit, allowed(timeout)), limit
                if limit > before:
                    continue  # the machine is slow
                raise self._too_late(answers, sorted(waiting.values()), timeout)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    self._processes[rank].join(5.0)
                    answers[rank] = (
                        False,
                        f"rank {rank} died with exit code {self._processes[rank].exitcode}",
                    )
        return answers

    def _too_late(self, answers: dict[int, tuple[bool, Any]], late: list[int], timeout: float) -> RankError:
        for rank in late:
            with suppress(OSError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        lines = [f"ranks {late} were not done after {timeout:g} s"]
        lines += [text for good, text in answers.values() if not good]
        lines += [f"stack of rank {rank}:\n{self._stacks[rank].read_text()}" for rank in late]
        self.kill()
        return RankError("\n\n".join(lines))


def fork_context() -> ForkServerContext:
    """The context whose processes are forked from one that has imported torch, the same one for all pools."""
    slowness_at_start()  # before the server, whose processes inherit it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "ldt.runtime", "ldt.testing"])
    with _environment("TORCH_DEVICE_BACKEND_AUTOLOAD", "0"):  # before the server imports torch
        forkserver.ensure_running()
    return context


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the context, unless it is set already."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _serve(pipe: Connection, rank: int, size: int, port: int, stack_file: str) -> None:
    """The main function of a pool's processes."""
    faulthandler.register(signal.SIGUSR1, file=Path(stack_file).open("w"), all_threads=True)  # noqa: SIM115
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, timeout=_RENDEZVOUS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_RENDEZVOUS)
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            break
        if not request:
            break
        try:
            module, name, code, args = pickle.loads(request)
            answer = pickle.dumps((True, _find(module, name, code)(*args)))
        except BaseException:
            answer = pickle.dumps((False, f"rank {rank} failed:\n{traceback.format_exc()}"))
        pipe.send_bytes(answer)
    dist.destroy_process_group()


def _find(module: str, name: str, code: str) -> Callable[..., Any]:
    """Return the function ``name`` of a module, imported by name or else from its file."""
    if module not in sys.modules:
        sys.path.insert(0, str(Path(code).parent))
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            spec = importlib.util.spec_from_file_location(module, code)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])
        finally:
            del sys.path[0]
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]
