"""The processes of one attempt on this site: started by torch, watched and ended here.

torch's own loop ends all ranks as soon as one fails, before they can raise what they know of it. So it only starts
them here, each in a session of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext, start_processes

from ldt.launch import tether
from ldt.launch.description import Description
from ldt.launch.environment import launched_environments
from ldt.launch.output import Output

__all__ = ["Ranks"]

_CLOSE_SECONDS = 10  # for the kernel to end what was killed


class Ranks:
    """The running ranks of a site. ``failure`` is the exit status of the first that failed, as a shell has it."""

    def __init__(self, description: Description, site: str, attempt: int, say: Callable[[str], None]) -> None:
        self.failure: int | None = None
        self._say = say
        self._began = time.monotonic()
        self._names = description.ranks_of(site)
        self._output = Output()
        envs = dict(enumerate(launched_environments(description, site, attempt)))
        command = (sys.executable, *description.command_of(site))
        arguments = ("-I", "-S", str(Path(tether.__file__)), str(os.getpid()), *command)
        files = _Files(
            {local: self._output.pipe(f"[{site} {rank}] ", sys.stdout) for local, rank in self._by_local()},
            {local: self._output.pipe(f"[{site} {rank}] ", sys.stderr) for local, rank in self._by_local()},
        )
        context = start_processes("ldt", sys.executable, dict.fromkeys(envs, arguments), envs, files)
        assert isinstance(context, SubprocessContext)
        self._output.close_here()
        self._context: SubprocessContext | None = context
        self._running = context.pids()
        for local, rank in self._by_local():
            stage = description.topology.node_of(rank).stage
            self._say(f"rank {rank} started: stage {stage}, attempt {attempt}, pid {self._running[local]}")

    def _by_local(self) -> list[tuple[int, int]]:
        return list(enumerate(self._names))

    @property
    def running(self) -> bool:
        """Whether a rank had not ended when ``poll`` last looked."""
        return bool(self._running)

    def poll(self) -> None:
        """Look which ranks have ended, say so, and kill what they have left in their sessions."""
        for local, pid in list(self._running.items()):
            status = _status(pid)
            if status is not None:
                self._kill(pid, signal.SIGKILL)
                del self._running[local]
                self._note(self._names[local], status)

    def _note(self, rank: int, status: int) -> None:
        how = f"exited with {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
        self._say(f"rank {rank} {how} after {time.monotonic() - self._began:.0f} s")
        if status and self.failure is None:
            self.failure = status if status > 0 else 128 - status

    def send(self, number: int) -> None:
        """Send a signal to all running ranks and what they have started."""
        for pid in self._running.values():
            self._kill(pid, number)

    @staticmethod
    def _kill(pid: int, number: int) -> None:
        """Send it to a session. The process was not waited for, so no other has its number yet."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)

    def close(self) -> None:
        """Kill what is left, wait for it, and print the last lines."""
        if self._context is not None:
            self.send(signal.SIGKILL)
            self._context.close(signal.SIGKILL, timeout=_CLOSE_SECONDS)
            self._context = None  # and with it its ends of the pipes
            self._output.drain()


class _Files(LogsSpecs):
    """Where torch lets the ranks print to."""

    def __init__(self, stdouts: dict[int, str], stderrs: dict[int, str]) -> None:
        super().__init__()
        self._dest = LogsDest(stdouts=stdouts, stderrs=stderrs, error_files=dict.fromkeys(stdouts, ""))

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return self._dest

    @property
    def root_log_dir(self) -> str:
        return ""


def _status(pid: int) -> int | None:
    """The exit status of a child, negative for a signal, or None while it runs. It still has to be waited for."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
