"""The process groups of a mesh: made one by one, broken all at once, dropped in the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ldt._torch_private import abort_group, is_registered
from ldt.runtime.comm.group_layout import GLOO, make_group
from ldt.runtime.common.teardown import run_teardown
from ldt.runtime.health.connections import Connections

__all__ = ["GroupSet"]

logger = logging.getLogger(__name__)

_DROPPING_SECONDS = 5.0


class GroupSet(Mapping[str, dist.ProcessGroup]):
    """Groups by name. One thread makes and drops them; any may abort or break them.

    After a failure, that is: ``abort`` ends at once what backends know to abort, ``break_all`` also what goes through
    gloo, and is for a rank that has left its groups or waits in vain there; ``drop`` destroys what is left.
    ``before_abort`` is called before any group is aborted: it ends the calls of those that use their communicators.
    """

    def __init__(self, before_abort: Callable[[], None] = lambda: None) -> None:
        self._before_abort = before_abort
        self._store: Any = None
        self._to_store = Connections()
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._connections: dict[str, Connections] = {}
        self._broken = False
        self._aborting = threading.Lock()
        self._aborted: set[str] = set()

    def __getitem__(self, name: str) -> dist.ProcessGroup:
        return self._groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def use_store(self, store: Any) -> None:
        """Make groups over a connection of their own to ``store``, whose end frees who waits there for other ranks."""
        with self._to_store.recording(store):
            self._store = store.clone() if hasattr(store, "clone") else store

    def make(
        self, name: str, key: str, ranks: Sequence[int], backend: str, timeout: timedelta
    ) -> dist.ProcessGroup:
        """Make and keep the group ``name``, which the store knows by ``key``. See ``make_group``."""
        connections = Connections()
        with connections.recording(self._store):
            group = make_group(key, ranks, backend, timeout, self._store)
        if backend == GLOO:
            self._connections[name] = connections
        self._groups[name] = group
        if self._broken:
            self.break_all()
        return group

    def abort(self) -> None:
        """After a failure: end what can be aborted, and the wait for ranks that do not come to make a group."""
        self._to_store.shutdown()
        self._before_abort()
        for name, group in list(self._groups.items()):
            with self._aborting:  # not while the backend does it, which may take long
                if name in self._connections or name in self._aborted:
                    continue
                self._aborted.add(name)
            try:
                group.abort()
            except Exception:  # the others must be aborted all the same
                logger.exception("could not abort the group %s", name)

    def break_all(self) -> None:
        """After a failure: end whatever a rank waits for in any of them, here and at the other ends.

        By a rank that itself waits in none, if it can be: where a connection is closed on its own side, gloo may forget
        who was just sending or receiving, and that one waits until the group's timeout.
        """
        self._broken = True
        run_teardown((f"break group {name}", one.shutdown) for name, one in list(self._connections.items()))
        self.abort()

    def lost_connections(self) -> int:
        """How many that gloo groups had are closed: whoever was at their other ends is gone, or was told to close."""
        return sum(connections.lost() for connections in list(self._connections.values()))

    def destroy(self) -> None:
        """Destroy them. A gloo group is gone once nothing runs in it any more, which is at once if all were broken.

        One that gloo has forgotten to free (see ``break_all``) is left to its timeout on a thread, and logged. Python
        may abort a process that ends just when that thread comes back.
        """
        releases: list[threading.Thread] = []
        first = run_teardown(
            ("drop group " + name, partial(self._drop_one, name, releases)) for name in list(self._groups)
        )
        deadline = time.monotonic() + _DROPPING_SECONDS
        for release in releases:
            release.join(max(0.0, deadline - time.monotonic()))
        left = sorted(release.name for release in releases if release.is_alive())
        if left:
            logger.warning(
                "%s: gloo still waits for something there; left until the group's timeout", ", ".join(left)
            )
        self._connections.clear()
        self._store = None
        if first is not None:
            raise first

    def _drop_one(self, name: str, releases: list[threading.Thread]) -> None:
        last = [self._groups.pop(name)]  # in a list, so that no variable here has it, too
        try:
            _unregister(last[0], abort=self._broken and name not in self._connections)
        finally:
            if self._broken:
                releases.append(_released(name, last))


def _unregister(group: dist.ProcessGroup, *, abort: bool) -> None:
    """torch forgets ``group``. To abort it is for after a failure: else what is queued in it would be flushed first."""
    if not is_registered(group):  # the whole world was destroyed before
        return
    if abort:
        abort_group(group)
    else:
        dist.destroy_process_group(group)


def _released(name: str, last: list[dist.ProcessGroup]) -> threading.Thread:
    """A thread that lets go of the ``last`` reference to a group, whose destructor waits for what runs in it."""
    thread = threading.Thread(target=last.clear, name=f"group {name}", daemon=True)
    thread.start()
    return thread
