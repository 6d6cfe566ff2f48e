"""The process groups of a mesh: made one by one, broken all at once, dropped in the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ldt.runtime.groups import GLOO, make_group
from ldt.runtime.sockets import Connections

__all__ = ["GroupSet"]

logger = logging.getLogger(__name__)

_DROPPING_SECONDS = 5.0


class GroupSet(Mapping[str, dist.ProcessGroup]):
    """Groups by name. One thread makes and drops them; any may abort or break them."""

    def __init__(self) -> None:
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

    def use(self, store: Any) -> None:
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
        self._to_store.cut()
        with self._aborting:
            for name, group in list(self._groups.items()):
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
        self.abort()
        for connections in list(self._connections.values()):
            connections.cut()

    def lost_connections(self) -> int:
        """How many that gloo groups had are closed: whoever was at their other ends is gone, or was told to close."""
        return sum(connections.lost() for connections in list(self._connections.values()))

    def drop(self) -> None:
        """Destroy them. A gloo group is gone once nothing runs in it any more, which is at once if all were broken.

        One that gloo has forgotten to free (see ``break_all``) is left to its timeout, and logged.
        """
        if self._broken:
            worker = threading.Thread(target=self._destroy_all, name="ldt-drop-groups", daemon=True)
            worker.start()
            worker.join(_DROPPING_SECONDS)
            if worker.is_alive():
                logger.warning("a process group still waits for something: it is left until its timeout")
        else:
            self._destroy_all()
        self._connections.clear()
        self._store = None

    def _destroy_all(self) -> None:
        """After a failure those that can be aborted are: destroying would first flush what is queued."""
        while self._groups:
            name, group = self._groups.popitem()
            if group not in c10d._world.pg_map:  # the whole world was destroyed before
                continue
            if self._broken and name not in self._connections and hasattr(c10d, "_abort_process_group"):
                c10d._abort_process_group(group)
            else:
                dist.destroy_process_group(group)
