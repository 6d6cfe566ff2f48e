"""The process groups of a mesh: created, broken all at once, destroyed in the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ldt._torch_private import HashStore, Store, abort_group, connected_gloo, is_registered
from ldt.runtime.comm.group_exchange import GroupRequest, Swap, make_together
from ldt.runtime.comm.group_layout import GLOO, make_group
from ldt.runtime.common.teardown import run_teardown
from ldt.runtime.health.connections import Connections
from ldt.runtime.health.store_connection import clone_of

__all__ = ["GroupSet"]

logger = logging.getLogger(__name__)

_DESTROY_SECONDS = 5.0


class GroupSet(Mapping[str, dist.ProcessGroup]):
    """Process groups by name. One thread creates and destroys them; any thread may abort or break them.

    After a failure ``abort`` aborts the groups whose backend supports that. ``break_all`` also unblocks gloo groups; it
    is for a rank that has left its groups or cannot get out of them. ``destroy`` destroys the rest.
    ``before_abort`` is called before any group is aborted: it ends direct calls on their communicators. Connections of
    gloo outlast an outage of up to ``outlast`` seconds.
    """

    def __init__(self, before_abort: Callable[[], None] = lambda: None, outlast: float = 0.0) -> None:
        self._before_abort = before_abort
        self._outlast = outlast
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

    def use_store(self, store: Any, seconds: float = 30.0, *, own_connection: bool = True) -> None:
        """Create groups over ``store``. A connection of their own is shut down to unblock waits for other ranks there.

        Only ``make`` needs it. Raises TimeoutError if the store does not answer within ``seconds``.
        """
        self._store = store
        if own_connection:
            self._store, self._to_store = clone_of(store, seconds)
            self._store.set_timeout(store.timeout)

    def make(
        self, name: str, key: str, ranks: Sequence[int], backend: str, timeout: timedelta
    ) -> dist.ProcessGroup:
        """Create and keep the group ``name``, under ``key`` in the store. See ``make_group``."""
        connections = Connections()
        with connections.recording(self._store):
            store = HashStore() if len(ranks) == 1 else self._store
            group = make_group(key, ranks, backend, timeout, store)
        if backend == GLOO:
            self._connections[name] = connections
            connections.outlast(self._outlast)
        self._groups[name] = group
        if self._broken:
            self.break_all()
        return group

    def make_gloo(
        self,
        requests: Sequence[GroupRequest],
        timeout: timedelta,
        swap: Swap,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Create and keep groups of gloo at once, which takes as long as one. See ``make_together``."""
        connections = Connections()
        self._connections.update((request.name, connections) for request in requests)
        failed = threading.Event()

        def make(request: GroupRequest, store: Store) -> None:
            group = make_group(request.key, request.ranks, GLOO, timeout, store)
            if failed.is_set():  # nobody waits for it any more
                _unregister(group, abort=False)
            else:
                self._groups[request.name] = group

        try:
            with connected_gloo(), connections.recording(self._store):
                make_together(requests, make, swap, check)
        except BaseException:
            failed.set()
            raise
        finally:
            connections.outlast(self._outlast)
            if self._broken:
                self.break_all()

    def abort(self) -> None:
        """After a failure: abort the groups that can be, and any wait for ranks that do not join a new group."""
        self._to_store.shutdown()
        self._before_abort()
        for name, group in list(self._groups.items()):
            with self._aborting:  # released during the backend's abort, which may take long
                if name in self._connections or name in self._aborted:
                    continue
                self._aborted.add(name)
            try:
                group.abort()
            except Exception:  # abort the others all the same
                logger.exception("could not abort the group %s", name)

    def break_all(self) -> None:
        """After a failure: unblock every wait in any of the groups, on this rank and its peers.

        Call it while this rank waits in none of them, if possible: when a connection is closed on its own side, gloo
        may forget an operation in flight, which then waits until the group's timeout.
        """
        self._broken = True
        run_teardown(("break groups", one.shutdown) for one in self._all_connections())
        self.abort()

    def lost_connections(self) -> list[str]:
        """The other ends of closed connections of gloo groups: they are dead, closing, or cut off by a reset."""
        return [peer for connections in self._all_connections() for peer in connections.lost()]

    def _all_connections(self) -> set[Connections]:
        """Groups that were made at once share theirs."""
        return set(self._connections.values())

    def destroy(self) -> None:
        """Destroy all groups. A gloo group is gone once nothing runs in it, which is at once if all were broken.

        A group with an operation that gloo forgot (see ``break_all``) is logged and left to a thread until its timeout.
        Python may abort a process that exits just when that thread returns.
        """
        releases: list[threading.Thread] = []
        first = run_teardown(
            ("destroy group " + name, partial(self._destroy_one, name, releases))
            for name in list(self._groups)
        )
        deadline = time.monotonic() + _DESTROY_SECONDS
        for release in releases:
            release.join(max(0.0, deadline - time.monotonic()))
        left = sorted(release.name for release in releases if release.is_alive())
        if left:
            logger.warning(
                "%s: gloo still waits for an operation; left to a thread until the group's timeout",
                ", ".join(left),
            )
        self._connections.clear()
        self._store = None
        if first is not None:
            raise first

    def _destroy_one(self, name: str, releases: list[threading.Thread]) -> None:
        last = [self._groups.pop(name)]  # in a list, so that no variable here holds a second reference
        try:
            _unregister(last[0], abort=self._broken and name not in self._connections)
        finally:
            if self._broken:
                releases.append(_released(name, last))


def _unregister(group: dist.ProcessGroup, *, abort: bool) -> None:
    """Remove ``group`` from torch, with ``abort`` after a failure: otherwise torch would flush its queue first."""
    if not is_registered(group):  # the default group was destroyed before
        return
    if abort:
        abort_group(group)
    else:
        dist.destroy_process_group(group)


def _released(name: str, last: list[dist.ProcessGroup]) -> threading.Thread:
    """A thread that drops the ``last`` reference to a group, whose destructor waits for what runs in it."""
    thread = threading.Thread(target=last.clear, name=f"group {name}", daemon=True)
    thread.start()
    return thread
