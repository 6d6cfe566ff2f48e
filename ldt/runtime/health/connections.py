"""The TCP connections that something opened: all that can end what waits in gloo."""

from __future__ import annotations

import os
import socket
import stat
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["Connections"]

_DESCRIPTORS = Path("/proc/self/fd")


_kept: weakref.WeakSet[Connections] = weakref.WeakSet()


class Connections:
    """The connections that were opened, by anyone in this process, while ``recording``; none where there is no procfs.

    gloo's collectives know no abort: who is in one, waits until its peers' sockets say that they are gone. So after a
    failure each rank ends its own connections, which frees its peers; for who waits in one here, see ``GroupSet``.
    What other threads of the job open meanwhile is ended as well; recording lasts for as long as a group is made, and
    ``connect`` makes one mesh at a time.
    """

    def __init__(self) -> None:
        self._opened: dict[int, int] = {}  # never changed, only replaced: several threads may look
        _kept.add(self)

    @contextmanager
    def recording(self, store: Any) -> Iterator[None]:
        """Where this process keeps ``store``, not what others open to it meanwhile."""
        before = _sockets()
        yield
        opened = dict(_sockets().items() - before.items())
        port = _port_of(store)
        self._opened = {
            descriptor: identity for descriptor, identity in opened.items() if _own_port(descriptor) != port
        }

    def __len__(self) -> int:
        return len(self._opened)

    def set_read_timeout(self, seconds: float) -> None:
        """Let a read that waits longer than that fail."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for connection in self._connected():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def shutdown(self) -> None:
        """End them, for both sides; whoever opened them still has to close them. Again, it does nothing."""
        for connection in self._connected():
            with suppress(OSError):  # the other side was first
                connection.shutdown(socket.SHUT_RDWR)
        self._opened = {}

    def lost(self) -> int:
        """How many were closed meanwhile, as gloo does with those that the other side has ended."""
        return sum(_identity(descriptor) != identity for descriptor, identity in self._opened.items())

    def close_in_child(self) -> None:
        """In a process that was forked: as long as that had them open, nobody would see them end with this one."""
        for descriptor, identity in self._opened.items():
            if _identity(descriptor) == identity:
                _replace(descriptor)
        self._opened = {}

    def _connected(self) -> Iterator[socket.socket]:
        """Those that are still what they were; a number may be another file's by now."""
        for descriptor, identity in self._opened.items():
            with suppress(OSError):
                copy = os.dup(descriptor)  # of which the number stays ours while it is looked at
                if _identity(copy) != identity:
                    os.close(copy)
                    continue
                with socket.socket(fileno=copy) as connection:
                    internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                    listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if internet and not listens:  # gloo takes the end of a socket it listens on for a bug
                        yield connection


def _close_in_child() -> None:
    for connections in list(_kept):
        connections.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


def _replace(descriptor: int) -> None:
    """By a file that is always empty, so that the number is nobody else's: who opened it may close it yet."""
    empty = os.open(os.devnull, os.O_RDWR)
    os.dup2(empty, descriptor, inheritable=False)
    os.close(empty)


def _identity(descriptor: int) -> int | None:
    """A number that no other socket gets; None if it is not one, or not open."""
    with suppress(OSError):
        status = os.fstat(descriptor)
        return status.st_ino if stat.S_ISSOCK(status.st_mode) else None
    return None


def _own_port(descriptor: int) -> int | None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        return int(one.getsockname()[1]) if one.family in (socket.AF_INET, socket.AF_INET6) else -1
    return -1


def _port_of(store: Any) -> int | None:
    """That at which a TCPStore, or one that other stores lead to, is kept."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def _sockets() -> dict[int, int]:
    """The open sockets: descriptor to identity."""
    try:
        descriptors = [int(path.name) for path in _DESCRIPTORS.iterdir()]
    except FileNotFoundError:
        return {}
    found = ((descriptor, _identity(descriptor)) for descriptor in descriptors)
    return {descriptor: identity for descriptor, identity in found if identity is not None}
