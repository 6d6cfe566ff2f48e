"""How the sites find each other where a firewall may let one of them in but not the other: both listen and dial."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from ldt.cli.link_check.conversation import Conversation
from ldt.cli.link_check.facts import Chosen, HostFacts
from ldt.errors import LdtError
from ldt.launch.description import Description
from ldt.launch.reach import dial
from ldt.untrusted import quoted

__all__ = ["Met", "meet"]

_POLL_SECONDS = 0.2
_HELLO_SECONDS = 5.0


class Met(NamedTuple):
    """The other site was met."""

    talk: Conversation
    theirs: HostFacts


def meet(description: Description, own: HostFacts, server: socket.socket, seconds: float) -> Met:
    """Wait for the other site, which runs the same. Raises LdtError if it does not come or has another description."""
    return _Meeting(description, own).run(server, seconds)


class _Meeting:
    """The site with the store's port chooses the connection: the first over which both have said who they are."""

    def __init__(self, description: Description, own: HostFacts) -> None:
        (self._other,) = {*description.sites} - {own.site}
        self._address = description.sites[self._other].address
        self._port = description.store[1] + 1
        self._description, self._own = description, own
        self._chooses = own.site == description.host
        self._lock = threading.Lock()
        self._found: queue.Queue[Met | LdtError] = queue.Queue()
        self._over = False
        self._problem = "nothing was tried"

    def run(self, server: socket.socket, seconds: float) -> Met:
        server.settimeout(_POLL_SECONDS)
        for work in (lambda: self._accept(server), self._dial):
            threading.Thread(target=work, daemon=True).start()
        try:
            found = self._found.get(timeout=seconds)
        except queue.Empty:
            cause = (
                "the tunnel is not up at both sites with the other's key (wg show names no latest handshake then), or "
                "a firewall blocks its UDP port"
                if self._description.tunnel
                else "firewalls let neither site in: python -m ldt tunnel needs one UDP port"
            )
            raise LdtError(
                f"{self._other} did not come within {seconds:g} s, and {self._address} port {self._port} could not be "
                f"reached ({self._problem}): start the same command there, with --site {self._other}. If it runs "
                f"there, the link is down, or {cause}"
            ) from None
        finally:
            self._over = True
        if isinstance(found, LdtError):
            raise found
        return found

    def _accept(self, server: socket.socket) -> None:
        while not self._over:
            with suppress(OSError):
                self._greet(server.accept()[0])

    def _dial(self) -> None:
        while not self._over:
            try:
                self._greet(dial(self._address, self._port))
            except OSError as error:
                self._problem = error.strerror or str(error)
            time.sleep(_POLL_SECONDS)

    def _greet(self, connection: socket.socket) -> None:
        """Put the connection into the queue if the other site is at its end, and it is the chosen one."""
        talk = Conversation(connection, self._other)
        try:
            talk.say(self._own)
            theirs = talk.hear(HostFacts, _HELLO_SECONDS)
            problem = self._problem_with(theirs)
            with self._lock:
                if self._over:
                    raise LdtError("another connection was chosen")
                if self._chooses and problem is None:
                    talk.say(Chosen())
                    self._over = True
            if not self._chooses and problem is None:
                talk.hear(Chosen, _HELLO_SECONDS)
        except (LdtError, OSError):
            connection.close()
            return
        self._found.put(Met(talk, theirs) if problem is None else LdtError(problem))

    def _problem_with(self, theirs: HostFacts) -> str | None:
        if theirs.site != self._other:
            return (
                f"at {self._address} the command has --site {quoted(theirs.site)}, expected {self._other!r}"
            )
        try:
            self._description.check_same(self._other, theirs.digests)
        except LdtError as error:
            return str(error)
        return None
