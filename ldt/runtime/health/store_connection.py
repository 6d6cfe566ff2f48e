"""A connection to the store that is made again if it breaks while the store is there."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from typing import Any

from ldt.runtime.health.connections import Connections, host_of, port_of

__all__ = ["StoreConnection", "answers"]

logger = logging.getLogger(__name__)

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
        self.may_return = False  # nothing answered the last attempt: the link is down, and may be for a while
        self._connect()

    def __getattr__(self, name: str) -> Any:
        if self.may_return:  # the connection is broken
            raise ConnectionError("its host does not answer")
        return getattr(self._current, name)

    def renew(self) -> bool:
        """Connect again if the store's host answers within half a second. Returns whether it did."""
        self.may_return = False
        try:
            _reach(self._origin)
            self._connect()
        except OSError as error:
            refuses = isinstance(error, (ConnectionRefusedError, ConnectionResetError))
            self.may_return = self._outlast > 0 and not refuses
            return False
        except Exception:
            return False
        logger.warning("the connection to the store was lost and made again")
        return True

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
    with suppress(OSError):
        _reach(store)
        return True
    return False


def _reach(store: Any) -> None:
    """Raise OSError if the store has no host that accepts a connection."""
    host, port = host_of(store), port_of(store)
    if host is None or port is None:
        raise ConnectionRefusedError("the store has no connections")
    socket.create_connection((host, port), _REACH_SECONDS).close()
