"""A connection of its own to the store. Its requests end in time, and it is made again if it breaks."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from ldt.runtime.health.connections import Connections, host_of, port_of, unwrapped

__all__ = ["StoreConnection", "check_host", "clone_of"]

logger = logging.getLogger(__name__)

_REACH_SECONDS = 0.5
_RENEW_SECONDS = 5.0
_TAKEN_OVER_SECONDS = 0.01  # in which a clone that has begun takes over the timeout of its store
_SOON_SECONDS = 0.5
_TORCH_LATER_SECONDS = 0.5  # than that timeout it gives up
_ENDING_SECONDS = 2.0


class StoreConnection:
    """A connection of its own to ``store``. It has the requests of a store; those in flight fail if it breaks.

    Args:
        store: Any store. Only a TCPStore, perhaps with prefixes, has connections.
        read_timeout: How long a request, and connecting, may take, in seconds. At least 1.
        outlast: How long the link may be down; 0 leaves TCP its limits.
        borrows: Use that of ``store``, until it breaks: its requests then have no limit but the store's own.

    Raises:
        TimeoutError: The store's host does not answer. RuntimeError if the connection breaks.
    """

    def __init__(self, store: Any, read_timeout: float, outlast: float, *, borrows: bool = False) -> None:
        self.origin = store
        self._current: Any = None
        self.may_return = False  # nothing answered the last attempt: the link is down, and may be for a while
        self._read_timeout = read_timeout
        self._outlast = outlast
        self._connections = Connections()
        if borrows:
            self._current = store
        else:
            self._connect(store, read_timeout)

    def __getattr__(self, name: str) -> Any:
        if self.may_return:  # the connection is broken
            raise ConnectionError("its host does not answer")
        return getattr(self._current, name)

    def get(self, key: str) -> Any:
        request = self.__getattr__("get")
        with self.ended_after(self._read_timeout):  # torch waits for the key before it reads
            return request(key)

    def multi_get(self, keys: Sequence[str]) -> Any:
        request = self.__getattr__("multi_get")
        with self.ended_after(self._read_timeout):
            return request(keys)

    def renew(self) -> bool:
        """Connect again if the store's host answers within half a second. Returns whether it did."""
        self.may_return = False
        try:
            _reach(self._current)
            self._connect(self._current, _RENEW_SECONDS)
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

    @contextmanager
    def ended_after(self, seconds: float) -> Iterator[None]:
        """Shut the connection down if the block takes longer."""
        limit = threading.Timer(seconds, self.shutdown)
        limit.daemon = True
        with suppress(RuntimeError):  # at interpreter exit no thread starts
            limit.start()
        try:
            yield
        finally:
            limit.cancel()

    def close(self) -> None:
        """Close the connection once no thread uses it."""
        self._current = self.origin = None

    def _connect(self, store: Any, seconds: float) -> None:
        self._current, connections = clone_of(store, seconds)
        connections.set_read_timeout(self._read_timeout)
        connections.outlast(self._outlast)
        self._connections = connections


def clone_of(store: Any, seconds: float) -> tuple[Any, Connections]:
    """A clone of ``store``, and its connection. The store itself if it has no clones.

    The clone waits up to ``seconds`` for keys. Raises TimeoutError if the store's host does not answer for so long,
    ConnectionRefusedError if it is there without the store, RuntimeError if it ends the connection.
    """
    connections, port = Connections(), port_of(store)
    if not hasattr(store, "clone") or port is None:
        return store.clone() if hasattr(store, "clone") else store, connections
    seconds = math.ceil(seconds)  # torch connects for whole seconds
    cloning = _Cloning(store)
    start = time.monotonic()
    with connections.recording(store):
        with _waiting_up_to(store, seconds):
            cloning.start()
            cloning.begun.wait()
            cloning.join(_TAKEN_OVER_SECONDS)
        cloning.join(_SOON_SECONDS)
        if cloning.is_alive():  # no earlier: the store looks up the name of each host that connects
            check_host(store)
        cloning.join(seconds + _TORCH_LATER_SECONDS - _SOON_SECONDS)
    connections.keep_only_to(port)
    if cloning.is_alive():
        connections.shutdown()  # torch waits without end for the first answer
        cloning.join(_ENDING_SECONDS)
    if time.monotonic() - start > seconds:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return cloning.result(), connections


class _Cloning(threading.Thread):
    """A thread that clones ``store``, as that may take long."""

    def __init__(self, store: Any) -> None:
        super().__init__(name="ldt-store", daemon=True)
        self.begun = threading.Event()
        self._store = store
        self._clone: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        self.begun.set()
        try:
            self._clone = self._store.clone()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._clone


@contextmanager
def _waiting_up_to(store: Any, seconds: float) -> Iterator[None]:
    """Give ``store`` this timeout for a moment. A clone that begins then keeps it."""
    store = unwrapped(store)
    before = store.timeout
    store.set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        store.set_timeout(before)


def check_host(store: Any) -> None:
    """Raise ConnectionRefusedError if the store's host is there without it: torch would try again until a timeout."""
    try:
        _reach(store)
    except ConnectionRefusedError:
        if port_of(store) is not None:
            raise
    except OSError:  # it may be late, or the link be down
        pass


def _reach(store: Any) -> None:
    """Raise OSError if the store has no host that accepts a connection within half a second."""
    host, port = host_of(store), port_of(store)
    if host is None or port is None:
        raise ConnectionRefusedError("the store has no connections")
    socket.create_connection((host, port), _REACH_SECONDS).close()
