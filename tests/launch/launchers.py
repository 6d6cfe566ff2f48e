"""Launchers of both sites on this host or in namespaces, each forked from a process that has imported torch already."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ldt.cli import main
from ldt.testing import allowed
from ldt.testing.pool import fork_context

__all__ = [
    "Command",
    "Launcher",
    "both",
    "describe",
    "is_gone",
    "kill_hard",
    "launch",
    "two_free_ports",
    "wait_for",
]

SECONDS = 60.0


def describe(folder: Path, script: str, tp: Sequence[int] = (1, 1), more: str = "") -> Path:
    """Write job.toml and its script. Both sites are 127.0.0.1, each with the stages that it has by default."""
    (folder / "train.py").write_text(script)
    file = folder / "job.toml"
    file.write_text(
        f"""
script = "train.py"
{more}
[topology]
tp = {list(tp)}
[sites.edge]
address = "127.0.0.1"
interface = "lo"
port = {two_free_ports()}
[sites.cloud]
address = "127.0.0.1"
interface = "lo"
"""
    )
    return file


def two_free_ports() -> int:
    """The first of two neighbours, below those that Linux gives to connections: no other test takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000, 2)
        with suppress(OSError):
            for each in (port, port + 1):
                socket.create_server(("127.0.0.1", each)).close()
            return port


class Command:
    """``python -m ldt`` with some arguments in a process of its own. ``place`` has its network namespace."""

    def __init__(self, arguments: Sequence[str], log: Path, place: Any = None) -> None:
        self.log = log
        self.process: Any = fork_context().Process(target=_main, args=(list(arguments), str(log), place))
        self.process.start()

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text() if self.log.exists() else ""

    def kill(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def status(self) -> int:
        """Wait for its end and return the exit status."""
        self.process.join(allowed(SECONDS))
        assert self.process.exitcode is not None, f"still running:\n{self.text}"
        return int(self.process.exitcode)


class Launcher(Command):
    """``python -m ldt launch FILE --site SITE OPTION ...``."""

    def __init__(self, file: Path, site: str, *options: str, place: Any = None) -> None:
        log = file.parent / f"{site}-{time.monotonic_ns()}.txt"
        super().__init__(["launch", str(file), "--site", site, *options], log, place)


def _main(arguments: list[str], log: str, place: Any) -> None:
    if place is not None:
        place.enter()
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.exit(main(arguments))


@contextmanager
def launch(file: Path, site: str, *options: str, place: Any = None) -> Iterator[Launcher]:
    """A launcher that is killed at the end, if it has not ended. ``place`` has its network namespace."""
    launcher = Launcher(file, site, *options, place=place)
    try:
        yield launcher
    finally:
        launcher.process.kill()
        launcher.process.join()


@contextmanager
def both(file: Path, *options: str) -> Iterator[tuple[Launcher, Launcher]]:
    """Those of the edge and the cloud."""
    with launch(file, "edge", *options) as edge, launch(file, "cloud", *options) as cloud:
        yield edge, cloud


def wait_for(condition: Callable[[], bool], what: Callable[[], str] = str) -> None:
    """Wait until ``condition`` holds. Raises AssertionError with ``what`` after a while."""
    deadline = time.monotonic() + allowed(SECONDS)
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """Whether no process has this number, or only one that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def kill_hard(launcher: Launcher) -> None:
    launcher.kill(signal.SIGKILL)
    launcher.process.join()
