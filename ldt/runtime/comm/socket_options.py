"""What socket links ask of the kernel."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ldt.runtime.health.connections import outlast

__all__ = ["BBR", "MAX_CONNECTIONS", "SocketSettings", "set_options", "set_pace", "set_unsent"]

MAX_CONNECTIONS = 64
BBR = "bbr"
_UNSENT_BYTES = 256 << 10  # in the kernel: what is further behind keeps its place in the plan's order
_SO_MAX_PACING_RATE = 47  # Linux; Python has no name for it
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # keeps a firewall's entry alive


@dataclass(frozen=True)
class SocketSettings:
    """Of the connections between two ranks. ``pace``: bytes per second that each sends at most; 0 for no limit."""

    connections: int
    pace: int = 0
    bbr: bool = False


def set_options(
    connections: Sequence[socket.socket], settings: SocketSettings, outlast_seconds: float
) -> None:
    """No delays, little unsent data in the kernel, and what ``settings`` say.

    They outlast an outage of up to ``outlast_seconds``, if not 0.
    """
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in {"TCP_NODELAY": 1, **_KEEPALIVE}.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        set_unsent(connection, _UNSENT_BYTES)
        set_pace(connection, settings.pace)
        outlast(connection, outlast_seconds)
        if settings.bbr:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, BBR.encode())


def set_unsent(connection: socket.socket, nbytes: int) -> None:
    """How much the kernel takes that TCP cannot send yet."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, nbytes)


def set_pace(connection: socket.socket, rate: int) -> None:
    """TCP spreads what the connection sends: ``rate`` bytes per second at most, 0 for no limit. Needs no root."""
    limit = rate or 2**64 - 1
    with suppress(OSError):  # Linux alone has it
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, limit.to_bytes(8, "little"))
