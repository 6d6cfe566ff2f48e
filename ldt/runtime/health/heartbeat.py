"""Heartbeats: each rank writes its status to the store and checks that of other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ldt.runtime.health.progress import Progress, RankStatus

__all__ = ["Heartbeats", "LivenessProbe"]

_BEAT_SECONDS = 0.2
_CHECK_SECONDS = 1.0  # how often a rank checks its neighbour
_LOOK_SECONDS = 1.0  # how often it reads the heartbeats of all ranks, if somebody looks at them
_BEATS_TO_WAIT = 7.5
_NEVER_SEEN = RankStatus(0).to_text().encode()
_RANKS_PER_BEAT = 250  # ranks of larger meshes beat less often, to bound the load on the store


class Heartbeats:
    """The heartbeats of a mesh, in the store under ``key``. ``ranks`` and ``rank``, this process, are global.

    ``on_beat`` is called when a new heartbeat of the next rank is seen, with the rank and by how long it was late.
    ``silence`` also knows the ranks ``watched``.
    """

    def __init__(
        self,
        key: str,
        ranks: Sequence[int],
        rank: int,
        progress: Progress,
        on_beat: Callable[[int, float], None] = lambda rank, silent: None,
        watched: Collection[int] = (),
    ) -> None:
        self._key = key
        self._ranks = ranks
        self._rank = rank
        self._progress = progress
        self._on_beat = on_beat
        self.period = _BEAT_SECONDS * max(1.0, len(ranks) / _RANKS_PER_BEAT)
        self._next_beat = 0.0
        self._next_check = 0.0
        self._next_look = 0.0
        # Gets all statuses, and must not raise.
        self.on_look: Callable[[dict[int, RankStatus]], None] | None = None
        neighbour = ranks[(ranks.index(rank) + 1) % len(ranks)]
        self._neighbour = None if neighbour == rank else neighbour
        self._watched = {*watched} if neighbour == rank else {*watched, neighbour}
        self._last: dict[int, tuple[bytes, float]] = {}  # of those, and when it was first seen

    def beat(self, store: Any) -> None:
        """Send a heartbeat if one is due. Called often, by one thread."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self.period
            self.beat_now(store)
        on_look = self.on_look  # another thread may set it to None
        if on_look is not None and now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            on_look(self.statuses(store))

    def beat_now(self, store: Any) -> None:
        store.set(f"{self._key}/{self._rank}", self._progress.status().to_text())

    def statuses(self, store: Any) -> dict[int, RankStatus]:
        """The last status of each rank, by global rank. Ranks that never sent a heartbeat are left out."""
        return {rank: RankStatus.from_text(text) for rank, text in self.texts(store).items()}

    def probe_liveness(self, store: Any) -> LivenessProbe:
        return LivenessProbe(self, store)

    def check_neighbour(self, store: Any, limit: float) -> tuple[int, RankStatus] | None:
        """The next rank and its last status, if it has sent no heartbeat for ``limit`` seconds.

        The ranks form a ring, so the first dead rank after a live one is always checked.
        """
        now, neighbour = time.monotonic(), self._neighbour
        if neighbour is None or now < self._next_check:
            return None
        self._next_check = now + _CHECK_SECONDS
        texts = self.texts(store, self._watched)
        for rank in self._watched:
            text, last = texts.get(rank, _NEVER_SEEN), self._last.get(rank)
            if last is None or last[0] != text:
                self._last[rank] = text, now
                if last is not None and rank == neighbour:
                    self._on_beat(rank, now - last[1] - self.period)
        status = RankStatus.from_text(self._last[neighbour][0])
        return (neighbour, status) if self.silence(neighbour) > limit and not status.closed else None

    def silence(self, rank: int) -> float:
        """For how many seconds no new heartbeat of ``rank`` was seen; 0 if it is not watched."""
        last = self._last.get(rank)
        return 0.0 if last is None else time.monotonic() - last[1]

    @property
    def others(self) -> set[int]:
        return set(self._ranks) - {self._rank}

    def texts(self, store: Any, ranks: Collection[int] | None = None) -> dict[int, bytes]:
        """The last heartbeat of each rank that sent one. Costs two store requests if all of them did."""
        keys = {rank: f"{self._key}/{rank}" for rank in (self._ranks if ranks is None else ranks)}
        if keys and not store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        return dict(zip(keys, store.multi_get(list(keys.values())), strict=True)) if keys else {}


class LivenessProbe:
    """Waits for a new heartbeat of every other rank, from its creation on. Ranks that have closed are not expected.

    Busy ranks may be late, so a rank is reported missing only after ``timeout`` seconds.
    """

    def __init__(self, heartbeats: Heartbeats, store: Any) -> None:
        self._heartbeats = heartbeats
        self._before = dict.fromkeys(heartbeats.others, _NEVER_SEEN) | heartbeats.texts(
            store, heartbeats.others
        )
        self.closed = frozenset(
            rank for rank, text in self._before.items() if RankStatus.from_text(text).closed
        )
        self._silent = set(self._before) - self.closed
        self._start = time.monotonic()
        self.timeout = _BEATS_TO_WAIT * heartbeats.period

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._start > self.timeout

    def missing(self, store: Any) -> dict[int, RankStatus]:
        """The ranks that have sent no heartbeat yet, and their last status."""
        now = self._heartbeats.texts(store, self._silent)
        self._silent = {rank for rank in self._silent if now.get(rank, _NEVER_SEEN) == self._before[rank]}
        return {rank: RankStatus.from_text(self._before[rank]) for rank in sorted(self._silent)}
