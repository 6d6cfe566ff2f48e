"""A store behind a link that goes down: all at once nothing passes, and no connection ends."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress

__all__ = ["Link"]

_POLL_SECONDS = 0.01


class Link:
    """Forwards connections to ``port`` of this host until it is down. A context manager; ``port`` is its own.

    ``admits``: whether new connections are still accepted then, as by a host that hangs, though nothing answers.
    """

    def __init__(self, port: int, admits: bool = False) -> None:
        self._target = port
        self._admits = admits
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64 if admits else 0)
        self.port: int = self._server.getsockname()[1]
        self._open: list[socket.socket] = [self._server]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._left: int | None = None
        self._ended = False
        self._down = threading.Event()
        self._up = threading.Event()
        self._up.set()
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *unused: object) -> None:
        self._ended = True
        self._up.set()
        self._thread.join()
        self._selector.close()
        for one in self._open:
            one.close()

    @property
    def is_down(self) -> bool:
        return not self._up.is_set()

    def cut(self, after: int = 0) -> None:
        """Let the link go down, ``after`` so many more messages from this side have passed."""
        self._left = after
        if not after:
            self._go_down()

    def mend(self) -> None:
        """Let everything pass again, also what has waited."""
        self._left = None
        self._up.set()

    def _go_down(self) -> None:
        self._up.clear()
        for _ in range(0 if self._admits else 3):  # what fills its queue, so that others get no answer
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(self._server.getsockname())
            self._open.append(one)

    def _forward(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select(_POLL_SECONDS):
                self._up.wait()
                if self._ended:
                    return
                if key.data is None:
                    self._join(*self._server.accept())
                else:
                    self._pass(key.fileobj, *key.data)  # type: ignore[arg-type]

    def _join(self, here: socket.socket, *unused: object) -> None:
        there = socket.create_connection(("127.0.0.1", self._target))
        self._open += [here, there]
        self._selector.register(here, selectors.EVENT_READ, (there, True))
        self._selector.register(there, selectors.EVENT_READ, (here, False))

    def _pass(self, source: socket.socket, target: socket.socket, goes: bool) -> None:
        data = b""
        with suppress(OSError):
            data = source.recv(1 << 16)
        if not data:
            self._selector.unregister(source)
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)
            return
        if goes and self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._go_down()
                self._up.wait()
        with suppress(OSError):
            target.sendall(data)
