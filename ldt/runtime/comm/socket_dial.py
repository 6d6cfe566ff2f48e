"""Opens the TCP connections of socket links. Who connects proves that it knows the listener's token."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

__all__ = ["Check", "accept", "address_of", "dial", "listen", "own_address"]

_POLL_SECONDS = 0.05
_HELLO = struct.Struct("!32sII")  # the listener's token, the rank that connects, the number of the connection
_WELCOME = b"\1"
_HELLO_SECONDS = 5.0
_BACKLOG = 1024
_DIALS = 32  # at once
_SIOCGIFADDR = 0x8915

Check = Callable[[str], None]  # raises LdtError with this problem once it is time to give up
Key = tuple[int, int]  # the rank that connects, and the number of the connection


def accept(
    server: socket.socket, token: str, expected: Collection[Key], check: Check
) -> dict[Key, socket.socket]:
    """The connections of that rank and number. Those that do not know the token are dropped."""
    found: dict[Key, socket.socket] = {}
    # Who has yet to take notice. That takes a round trip, so all are waited for together.
    welcomed: dict[Key, socket.socket] = {}
    while missing := set(expected) - found.keys():
        check(f"ranks {sorted({rank for rank, _ in missing})} did not connect to {address_of(server)}")
        with suppress(OSError):  # nobody yet, or nobody who speaks to us
            caller = server.accept()[0]
            key = _read_hello(caller, token)
            if key is not None and key in missing:
                caller.sendall(_WELCOME)
                welcomed[key] = caller
            else:
                caller.close()
        if welcomed.keys() == missing:
            found |= {key: caller for key, caller in welcomed.items() if _is_there(caller)}
            welcomed.clear()
    return found


def dial(
    own: int, offers: Mapping[int, Mapping[str, str]], numbers: Mapping[int, range], check: Check
) -> dict[int, list[socket.socket]]:
    """Connections of those numbers from rank ``own`` to each rank that listens at the address of its offer."""

    def connect(rank: int, number: int) -> socket.socket:
        host, port = offers[rank]["address"].rsplit(":", 1)
        hello = _HELLO.pack(offers[rank]["token"].encode(), own, number)
        while (connection := _greet(host, int(port), hello)) is None:
            check(f"rank {rank} cannot be reached at {offers[rank]['address']}")
            time.sleep(_POLL_SECONDS)
        return connection

    with ThreadPoolExecutor(_DIALS) as threads:  # a long link would make each wait for the one before
        started = {
            rank: [threads.submit(connect, rank, number) for number in numbers[rank]] for rank in offers
        }
        return {rank: [one.result() for one in found] for rank, found in started.items()}


def listen() -> socket.socket:
    """A socket that listens on a free port and whose ``accept`` returns after a moment if nobody comes."""
    server = socket.create_server((own_address(), 0), backlog=_BACKLOG)
    server.settimeout(_POLL_SECONDS)
    return server


def own_address() -> str:
    """The IPv4 address of GLOO_SOCKET_IFNAME, else that of the host's name, else the loopback's, as gloo chooses."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def address_of(server: socket.socket) -> str:
    """Host and port, as in an offer."""
    host, port = server.getsockname()[:2]
    return f"{host}:{port}"


def _greet(host: str, port: int, hello: bytes) -> socket.socket | None:
    """A connection that was welcomed after ``hello``; None if there is none."""
    with suppress(OSError), ExitStack() as undo:
        connection = undo.enter_context(socket.create_connection((host, port), timeout=_HELLO_SECONDS))
        connection.sendall(hello)
        if connection.recv(1) == _WELCOME:
            connection.sendall(_WELCOME)
            undo.pop_all()
            return connection
    return None


def _is_there(caller: socket.socket) -> bool:
    """Whether the other end of a welcomed connection took notice: it may have given up and try again."""
    with suppress(OSError):
        if caller.recv(1) == _WELCOME:
            return True
    caller.close()
    return False


def _read_hello(caller: socket.socket, token: str) -> Key | None:
    """The rank and the number of a connection that knows ``token``; None for any other."""
    caller.settimeout(_HELLO_SECONDS)
    try:
        with caller.makefile("rb") as stream:  # nothing follows a hello until it is answered
            name, rank, number = _HELLO.unpack(stream.read(_HELLO.size))
    except (OSError, struct.error):
        return None
    return (rank, number) if secrets.compare_digest(name, token.encode()) else None
