"""The TCP connections that something opened: all that can end what waits in gloo."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["Connections"]

_DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """The connections that were opened, by anyone in this process, while ``recording``; none where there is no procfs.

    gloo's collectives know no abort: who is in one, waits until its peers' sockets say that they are gone. So after a
    failure each rank ends its own connections, which frees itself and its peers at once, whatever these are doing.
    """

    def __init__(self) -> None:
        self._opened: dict[int, str] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        before = _sockets()
        yield
        self._opened = dict(_sockets().items() - before.items())

    def __len__(self) -> int:
        return len(self._opened)

    def limit_answers(self, seconds: float) -> None:
        """Let a read that waits longer than that fail."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for connection in self._connected():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def cut(self) -> None:
        """End them, for both sides; whoever opened them still has to close them. Again, it does nothing."""
        for connection in self._connected():
            with suppress(OSError):  # the other side was first
                connection.shutdown(socket.SHUT_RDWR)
        self._opened.clear()

    def _connected(self) -> Iterator[socket.socket]:
        """Those that are still what they were; a number may be another file's by now."""
        now = _sockets()
        for descriptor, identity in self._opened.items():
            if now.get(descriptor) != identity:
                continue
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if internet and not listens:  # gloo takes the end of a socket it listens on for a bug
                    yield connection


def _sockets() -> dict[int, str]:
    """The open sockets: descriptor to a name that no other one gets."""
    found = {}
    with suppress(FileNotFoundError):
        for descriptor in _DESCRIPTORS.iterdir():
            with suppress(OSError):  # closed since
                target = str(descriptor.readlink())
                if target.startswith("socket:"):
                    found[int(descriptor.name)] = target
    return found
