"""The stores of a job: opened by the launcher of the site with the port, reached by the others."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ldt._torch_private import TCPStore
from ldt.errors import LdtError
from ldt.launch.description import Description
from ldt.launch.signals import Signals
from ldt.launch.store_thread import StoreThread, first_line

__all__ = ["reach", "serve"]

_OPEN_SECONDS = 30.0
_LIMIT = timedelta(seconds=_OPEN_SECONDS)
_POLL_SECONDS = 0.2


def serve(thread: StoreThread, address: str, port: int) -> Any:
    """Open a store on this host, which lives as long as the object. Raises LdtError if it cannot."""
    try:
        return thread.ask(
            lambda _: TCPStore(address, port, None, True, _LIMIT, wait_for_workers=False), _OPEN_SECONDS
        )
    except LdtError as error:
        raise LdtError(
            f"there can be no store at {address} port {port}: is the address one of this host, and the port free? "
            f"{first_line(error.__cause__ or error)}"
        ) from error


def reach(
    thread: StoreThread,
    description: Description,
    port: int,
    timeout: float,
    signals: Signals,
    say: Callable[[str], None],
) -> Any:
    """Wait up to ``timeout`` seconds for the store that another site keeps at ``port``, and connect to it."""
    address, _ = description.store
    deadline, said = time.monotonic() + timeout, False
    while (problem := _refused(address, port)) is not None:  # torch's own wait would not see a signal
        signals.check()
        if time.monotonic() > deadline:
            raise LdtError(
                f"{address} port {port} did not answer within {timeout:g} s ({problem}): start the launcher of "
                f"{description.host}, and let its firewall admit ports {port - 1} and {port}"
            )
        if not said:
            say(f"waiting for the launcher of {description.host} at {address}")
            said = True
        time.sleep(_POLL_SECONDS)
    return thread.ask(lambda _: TCPStore(address, port, None, False, _LIMIT), _OPEN_SECONDS)


def _refused(address: str, port: int) -> OSError | None:
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError as error:
        return error
    return None
