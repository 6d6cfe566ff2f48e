"""Detects leaks of a process: compares its threads, file descriptors, children and memory between two moments."""

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

__all__ = ["Connection", "Resources", "borrowed_socket", "reset", "resident_bytes", "tcp_connections"]

SETTLING_SECONDS = 2.0  # the kernel and joined threads may take a moment
_ESTABLISHED = 1
_INFO_BYTES = 256
_ACKED = slice(120, 128)  # tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info, linux/tcp.h
_RECEIVED = slice(128, 136)


class Resources(NamedTuple):
    """The threads by name, open files by kind (sockets count as one), and children of all threads."""

    threads: Counter[str]
    files: Counter[str]
    children: frozenset[str]

    @classmethod
    def now(cls) -> Resources:
        gc.collect()
        tasks = list(Path("/proc/self/task").iterdir())
        names: Counter[str] = Counter()
        children: set[str] = set()
        for task in tasks:
            with suppress(OSError):  # a thread has just ended
                names[(task / "comm").read_text().strip()] += 1
                children.update((task / "children").read_text().split())
        # A compiler that is run as root may replace /dev/null, and what is open is then "deleted".
        files = Counter(re.sub(r":\[\d+\]|(?<=null) \(deleted\)$", "", link) for _, link in _links())
        return cls(names, files, frozenset(children))

    def excess_over(self, before: Resources) -> list[str]:
        """Return what exceeds ``before``, in words. Empty if nothing does."""
        more = [f"{number} threads {name}" for name, number in (self.threads - before.threads).items()]
        more += [f"{number} open {name}" for name, number in (self.files - before.files).items()]
        return more + [f"child process {pid}" for pid in sorted(self.children - before.children)]

    def leaked_since(self) -> list[str]:
        """Return what the process holds beyond this snapshot, after some time to settle."""
        deadline = time.monotonic() + SETTLING_SECONDS
        while (more := Resources.now().excess_over(self)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return more


class Connection(NamedTuple):
    """A connected TCP socket of this process, and its bytes sent and received; ``crosses`` to another address."""

    fd: int
    peer_port: int
    sent: int
    received: int
    crosses: bool = False


def tcp_connections() -> list[Connection]:
    """Return the established TCP connections, by file descriptor."""
    return [found for fd, link in sorted(_links()) if link.startswith("socket:") for found in _connection(fd)]


def _connection(fd: int) -> Iterator[Connection]:
    with suppress(OSError), borrowed_socket(fd) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if info[0] == _ESTABLISHED:
            sent, received = (int.from_bytes(info[part], "little") for part in (_ACKED, _RECEIVED))
            crosses = sock.getsockname()[0] != sock.getpeername()[0]
            yield Connection(fd, sock.getpeername()[1], sent, received, crosses)


@contextmanager
def borrowed_socket(fd: int) -> Iterator[socket.socket]:
    """Duplicate ``fd`` as a socket object; ``fd`` stays open."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        yield sock


def reset(sock: socket.socket) -> None:
    """End the connection as if a reset had come from the network; the other end gets one."""
    no_address = ctypes.create_string_buffer(16)  # of family AF_UNSPEC: Linux disconnects, with a reset
    if ctypes.CDLL(None, use_errno=True).connect(sock.fileno(), no_address, 16):
        raise OSError(ctypes.get_errno(), "the connection could not be reset")


def _links() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            yield int(entry.name), str(entry.readlink())


def resident_bytes() -> int:
    """Return the resident memory of this process after garbage collection and malloc_trim."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
