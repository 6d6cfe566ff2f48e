"""What a process holds of the system: threads, file descriptors, children, memory; and how two moments differ."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Connection", "Holdings", "borrowed_socket", "resident_bytes", "tcp_connections"]

SETTLING_SECONDS = 2.0  # the kernel and joined threads may take a moment
_ESTABLISHED = 1
_INFO_BYTES = 256
_ACKED = slice(120, 128)  # tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info, linux/tcp.h
_RECEIVED = slice(128, 136)


class Holdings(NamedTuple):
    """Threads by name, open files by what they are (all sockets alike), and the children of all threads."""

    threads: Counter[str]
    files: Counter[str]
    children: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        tasks = list(Path("/proc/self/task").iterdir())
        names: Counter[str] = Counter()
        children: set[str] = set()
        for task in tasks:
            with suppress(OSError):  # a thread that has just ended
                names[(task / "comm").read_text().strip()] += 1
                children.update((task / "children").read_text().split())
        files = Counter(re.sub(r":\[\d+\]", "", link) for _, link in _links())
        return cls(names, files, frozenset(children))

    def more_than(self, before: Holdings) -> list[str]:
        """What is here and was not there, in words. Empty if nothing."""
        more = [f"{number} threads {name}" for name, number in (self.threads - before.threads).items()]
        more += [f"{number} open {name}" for name, number in (self.files - before.files).items()]
        return more + [f"child process {pid}" for pid in sorted(self.children - before.children)]

    def left_since(self) -> list[str]:
        """What the process holds more than at this moment, once it had time to settle."""
        deadline = time.monotonic() + SETTLING_SECONDS
        while (more := Holdings.now().more_than(self)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return more


class Connection(NamedTuple):
    """A connected TCP socket of this process, and the bytes that have gone each way."""

    fd: int
    peer_port: int
    sent: int
    received: int


def tcp_connections() -> list[Connection]:
    """Those that are established, by file descriptor."""
    return [found for fd, link in sorted(_links()) if link.startswith("socket:") for found in _connection(fd)]


def _connection(fd: int) -> Iterator[Connection]:
    with suppress(OSError), borrowed_socket(fd) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if info[0] == _ESTABLISHED:
            sent, received = (int.from_bytes(info[part], "little") for part in (_ACKED, _RECEIVED))
            yield Connection(fd, sock.getpeername()[1], sent, received)


@contextmanager
def borrowed_socket(fd: int) -> Iterator[socket.socket]:
    """Another name for what ``fd`` is; the descriptor itself stays as it is."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        yield sock


def _links() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing itself
            yield int(entry.name), str(entry.readlink())


def resident_bytes() -> int:
    """The resident memory of this process, once the collector has run and freed pages were given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
