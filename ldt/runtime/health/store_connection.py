"""A connection to the store that is made again if it breaks while the store is there."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

from ldt.runtime.health.connections import Connections, host_of, port_of

__all__ = ["StoreConnection", "answers"]

_REACH_SECONDS = 0.5


class StoreConnection:
    """A connection of its own to ``store``. It has the requests of a store; those in flight fail if it breaks.

    Args:
        store: Any store. Only a TCPStore, perhaps with prefixes, has connections.
        read_timeout: How long a request may take, in seconds.
        outlast: How long the link may be down; 0 leaves TCP its limits.
    """

    def __init__(self, store: Any, read_timeout: float, outlast: float) -> None:
        self._origin = store
        self._read_timeout = read_timeout
        self._outlast = outlast
        self._connect()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current, name)

    def renew(self) -> bool:
        """Connect again if the store's host answers within half a second. Returns whether it did."""
        with suppress(Exception):
            if answers(self._origin):
                self._connect()
                return True
        return False

    def shutdown(self) -> None:
        """Shut the connection down: what waits for an answer fails."""
        self._connections.shutdown()

    def close(self) -> None:
        """Close the connection once no thread uses it."""
        self._current = self._origin = None

    def _connect(self) -> None:
        connections = Connections()
        with connections.recording(self._origin):
            self._current = self._origin.clone() if hasattr(self._origin, "clone") else self._origin
        connections.keep_only_to(port_of(self._origin))
        connections.set_read_timeout(self._read_timeout)
        connections.outlast(self._outlast)
        self._connections = connections


def answers(store: Any) -> bool:
    """Whether the store's host accepts connections. A new connection to one that is gone would last until a timeout."""
    host, port = host_of(store), port_of(store)
    if host is None or port is None:
        return False
    with suppress(OSError), socket.create_connection((host, port), _REACH_SECONDS):
        return True
    return False
