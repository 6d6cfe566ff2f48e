"""Whether a site can connect to another one, and which of two has to for gloo."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import Literal

from ldt.errors import LdtError
from ldt.launch.description import Description

__all__ = ["Outcome", "dial", "dialling_site", "listen", "outcome_of"]

Outcome = Literal["connects", "refused", "no answer", "no route"]

_DIAL_SECONDS = 3.0
_NOT_HERE = (errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN)


def listen(address: str, port: int) -> socket.socket:
    """Listen at that port of the address, 0 for a free one; at all, if the host has not the address, as behind NAT.

    Likewise if it cannot resolve it, as others may.

    Raises LdtError if the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        try:
            return socket.create_server((address, port), family=family, backlog=64)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
        return socket.create_server(("", port), family=family, backlog=64)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise LdtError(
            f"cannot listen at port {port} ({why}): end the job or the launcher that uses it"
        ) from error


def dial(address: str, port: int) -> socket.socket:
    """Connect. Raises OSError after some seconds without an answer."""
    return socket.create_connection((address, port), timeout=_DIAL_SECONDS)


def outcome_of(address: str, port: int) -> Outcome:
    """How the port answers."""
    try:
        dial(address, port).close()
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return "no answer" if error.errno == errno.ETIMEDOUT else "no route"
    return "connects"


def dialling_site(description: Description, one: str, other: str) -> str | None:
    """Of two sites, the one from which gloo connects. None if only a resolver knows, or if their addresses are equal.

    gloo dials from the numerically larger address (gloo/transport/tcp/pair.cc, in torch 2.13).
    """
    try:
        numbers = {int(ipaddress.ip_address(description.sites[site].address)): site for site in (one, other)}
    except ValueError:
        return None
    return numbers[max(numbers)] if len(numbers) == 2 else None
