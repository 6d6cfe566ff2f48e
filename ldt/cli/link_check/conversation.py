"""A connection over which both sites talk, a line of JSON at a time, each within a limit of time and size."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from typing import Any, TypeVar

from ldt.errors import LdtError
from ldt.schema import fit
from ldt.untrusted import parse

__all__ = ["Conversation"]

_MAX_LINE = 1 << 20
_SECONDS = 20.0
_SEND_BYTES = 512 << 10  # a message does not wait in ``say`` for those before it to arrive
_T = TypeVar("_T")


class Conversation:
    """``other`` is the site at the other end. Raises LdtError that names it when it is silent or makes no sense."""

    def __init__(self, connection: socket.socket, other: str) -> None:
        self.other = other
        self.connection = connection
        self._rest = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)

    def say(self, message: Any) -> None:
        """Send a dataclass of ``facts``."""
        self.connection.settimeout(_SECONDS)
        try:
            self.connection.sendall(json.dumps(dataclasses.asdict(message)).encode() + b"\n")
        except OSError as error:
            raise self._lost(error) from error

    def hear(self, kind: type[_T], seconds: float = _SECONDS) -> _T:
        """Wait for a message of that dataclass. Raises TimeoutError after ``seconds``."""
        line = self._line(time.monotonic() + seconds)
        try:
            made: _T = fit(parse(line), kind)
        except ValueError as error:
            raise LdtError(
                f"{self.other} sent another message than expected, a {kind.__name__}: {error}; "
                "do both sites have the same version of ldt?"
            ) from error
        return made

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._rest:
            if len(self._rest) > _MAX_LINE:
                raise LdtError(f"{self.other} sent a line of more than {_MAX_LINE} bytes")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.other} was silent")
            self.connection.settimeout(left)
            try:
                found = self.connection.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError as error:
                raise self._lost(error) from error
            if not found:
                raise LdtError(f"{self.other} has closed the connection: look at what the command says there")
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _lost(self, error: OSError) -> LdtError:
        return LdtError(f"the connection to {self.other} was lost: {error.strerror or error}")
