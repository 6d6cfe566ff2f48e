"""Tracks TCP connections so that a failure can shut them down: nothing else unblocks a gloo collective."""

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

__all__ = ["Connections", "host_of", "outlast", "outlast_served", "port_of", "unwrapped"]

_DESCRIPTORS = Path("/proc/self/fd")
_USER_TIMEOUT = 18  # TCP_USER_TIMEOUT of Linux
_RTO_MAX = 44  # TCP_RTO_MAX_MS, for which Python has no name
_MOST_MILLISECONDS = 2**31 - 1
_PROBE_SECONDS = 5  # of silence, after which TCP asks whether the other end still knows the connection

_instances: weakref.WeakSet[Connections] = weakref.WeakSet()


class Connections:
    """The connections that this process opened during ``recording``; none on systems without procfs.

    gloo collectives cannot be aborted: a rank in one waits until its peers' sockets close. After a failure each rank
    therefore shuts down its own connections, which unblocks its peers. ``GroupSet`` unblocks this rank's own waits.
    Connections that other threads open during the recording are shut down, too. A recording lasts only while groups
    are created, and ``connect`` creates one mesh at a time.
    """

    def __init__(self) -> None:
        self._opened: dict[int, int] = {}  # replaced, never mutated: several threads read it
        self._peers: dict[int, str] = {}
        _instances.add(self)

    @contextmanager
    def recording(self, store: Any) -> Iterator[None]:
        """Record what is opened in this block, except for connections to the server of ``store`` in this process."""
        before = _sockets()
        try:
            yield
        finally:
            opened = dict(_sockets().items() - before.items())
            port = port_of(store)
            self._opened = {
                descriptor: identity
                for descriptor, identity in opened.items()
                if _own_port(descriptor) != port
            }
            self._peers = {descriptor: _peer_of(descriptor) for descriptor in self._opened}

    def keep_only_to(self, port: int | None) -> None:
        """Forget those to other ports, which other threads opened meanwhile."""
        self._opened = {fd: identity for fd, identity in self._opened.items() if _peer_port(fd) == port}

    def __len__(self) -> int:
        return len(self._opened)

    def set_read_timeout(self, seconds: float) -> None:
        """Make reads that block for longer than ``seconds`` fail."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for connection in self._connected():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def outlast(self, seconds: float) -> None:
        """See ``outlast``, for all of them."""
        for connection in self._connected() if seconds else ():
            outlast(connection, seconds)

    def shutdown(self) -> None:
        """Shut down all connections in both directions. Their owner still has to close them. Idempotent."""
        for connection in self._connected():
            with suppress(OSError):  # the peer has closed it
                connection.shutdown(socket.SHUT_RDWR)
        self._opened = {}

    def lost(self) -> list[str]:
        """The other ends of connections that have closed. gloo closes those that the peer has shut down."""
        return [self._peers[fd] for fd, identity in self._opened.items() if _identity(fd) != identity]

    def close_in_child(self) -> None:
        """Close the copies in a forked child. Peers see a connection end only once no process has it open."""
        for descriptor, identity in self._opened.items():
            if _identity(descriptor) == identity:
                _replace(descriptor)
        self._opened = {}

    def _connected(self) -> Iterator[socket.socket]:
        """The recorded sockets that are still open. A descriptor may have been reused since."""
        for descriptor, identity in self._opened.items():
            with suppress(OSError):
                copy = os.dup(descriptor)  # nobody else can close the copy during the check
                if _identity(copy) != identity:
                    os.close(copy)
                    continue
                with socket.socket(fileno=copy) as connection:
                    internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                    listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if internet and not listens:  # gloo treats a closed listening socket as a bug
                        yield connection


def outlast(connection: socket.socket, seconds: float) -> None:
    """Keep the connection over an outage of up to ``seconds``; a link that is back is noticed within a second.

    0 leaves TCP its own limits. Before Linux 6.15, TCP doubles the time between its attempts, so it may notice after
    as long as the outage took. A connection that the other end has lost meanwhile ends, though this one only receives.
    """
    if not seconds:
        return
    milliseconds = min(int(1e3 * seconds), _MOST_MILLISECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(AttributeError, OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, milliseconds)
        connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX, 1000)  # alone, it would give up after 14 s


def outlast_served(store: Any, seconds: float) -> None:
    """See ``outlast``, for the connections that the server of ``store`` has if it is in this process."""
    port = port_of(store)
    for descriptor in _sockets() if port and seconds else ():
        if _own_port(descriptor) == port:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                outlast(connection, seconds)


def _close_in_child() -> None:
    for connections in list(_instances):
        connections.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


def _replace(descriptor: int) -> None:
    """Replace it with /dev/null, so that the number is not reused: its owner may still close it."""
    empty = os.open(os.devnull, os.O_RDWR)
    os.dup2(empty, descriptor, inheritable=False)
    os.close(empty)


def _identity(descriptor: int) -> int | None:
    """The socket's inode, which is unique; None if the descriptor is closed or not a socket."""
    with suppress(OSError):
        status = os.fstat(descriptor)
        return status.st_ino if stat.S_ISSOCK(status.st_mode) else None
    return None


def _own_port(descriptor: int) -> int | None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        return int(one.getsockname()[1]) if one.family in (socket.AF_INET, socket.AF_INET6) else -1
    return -1


def host_of(store: Any) -> str | None:
    """The host of the TCPStore that ``store`` is or wraps, as its clients name it."""
    return getattr(unwrapped(store), "host", None)


def _peer_port(descriptor: int) -> int | None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        return int(one.getpeername()[1]) if one.family in (socket.AF_INET, socket.AF_INET6) else -1
    return -1


def _peer_of(descriptor: int) -> str:
    """Host and port of the other end; "" if there is none."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family in (socket.AF_INET, socket.AF_INET6):
            return "{}:{}".format(*one.getpeername()[:2])
    return ""


def port_of(store: Any) -> int | None:
    """The port of the TCPStore that ``store`` is or wraps."""
    return getattr(unwrapped(store), "port", None)


def unwrapped(store: Any) -> Any:
    """The store without its prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _sockets() -> dict[int, int]:
    """The identities of all open sockets by descriptor."""
    try:
        descriptors = [int(path.name) for path in _DESCRIPTORS.iterdir()]
    except FileNotFoundError:
        return {}
    found = ((descriptor, _identity(descriptor)) for descriptor in descriptors)
    return {descriptor: identity for descriptor, identity in found if identity is not None}
