"""Signs of life: each rank leaves in the store what it is doing, and looks there for whom it misses."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from ldt.runtime.health.progress import Progress, RankStatus

__all__ = ["Heartbeats", "LivenessProbe"]

_BEAT_SECONDS = 0.2
_LOOK_SECONDS = 1.0  # how often a rank looks after its neighbour
_BEATS_TO_WAIT = 7.5
_NEVER_SEEN = RankStatus(0).to_text().encode()
_RANKS_PER_BEAT = 250  # of larger meshes ranks beat less often, so that the store is not asked more often


class Heartbeats:
    """Those of the global ``ranks`` of a mesh, of which this process is ``rank``, in the store under ``key``."""

    def __init__(self, key: str, ranks: Sequence[int], rank: int, progress: Progress) -> None:
        self._key = key
        self._ranks = ranks
        self._rank = rank
        self._progress = progress
        self.period = _BEAT_SECONDS * max(1.0, len(ranks) / _RANKS_PER_BEAT)
        self._next_beat = 0.0
        self._next_look = 0.0
        neighbour = ranks[(ranks.index(rank) + 1) % len(ranks)]
        self._neighbour = None if neighbour == rank else neighbour
        self._neighbours_last: tuple[bytes, float] | None = None

    def beat(self, store: Any) -> None:
        """Leave a sign of life if it is time for one. Called often, by one thread."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self.period
            self.beat_now(store)

    def beat_now(self, store: Any) -> None:
        store.set(f"{self._key}/{self._rank}", self._progress.status().to_text())

    def statuses(self, store: Any) -> dict[int, RankStatus]:
        """What each rank, by its global number, was last seen doing. Without those that were never seen."""
        return {rank: RankStatus.from_text(text) for rank, text in self.texts(store).items()}

    def probe_liveness(self, store: Any) -> LivenessProbe:
        return LivenessProbe(self, store)

    def look_after_neighbour(self, store: Any, limit: float) -> tuple[int, RankStatus] | None:
        """The next rank, and what it was last seen doing, if it has given no sign of life for ``limit`` seconds.

        Each looks after one, so one of those next to ranks that are gone is still there.
        """
        now = time.monotonic()
        if self._neighbour is None or now < self._next_look:
            return None
        self._next_look = now + _LOOK_SECONDS
        text = self.texts(store, [self._neighbour]).get(self._neighbour, _NEVER_SEEN)
        if self._neighbours_last is None or self._neighbours_last[0] != text:
            self._neighbours_last = text, now
        status = RankStatus.from_text(text)
        return (
            (self._neighbour, status)
            if now - self._neighbours_last[1] > limit and not status.closed
            else None
        )

    @property
    def others(self) -> set[int]:
        return set(self._ranks) - {self._rank}

    def texts(self, store: Any, ranks: Collection[int] | None = None) -> dict[int, bytes]:
        """What ranks have left, without those that never did: two questions to the store, unless there are such."""
        keys = {rank: f"{self._key}/{rank}" for rank in (self._ranks if ranks is None else ranks)}
        if keys and not store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        return dict(zip(keys, store.multi_get(list(keys.values())), strict=True)) if keys else {}


class LivenessProbe:
    """Asks all other ranks for a sign of life, from when it is made on. Those that have closed need not give one.

    Ranks that are busy may be late, so it takes ``patience`` seconds until one can be said to be missing.
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
        self.patience = _BEATS_TO_WAIT * heartbeats.period

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._start > self.patience

    def missing(self, store: Any) -> dict[int, RankStatus]:
        """Ranks that have given no sign of life yet, and what they were last seen doing."""
        now = self._heartbeats.texts(store, self._silent)
        self._silent = {rank for rank in self._silent if now.get(rank, _NEVER_SEEN) == self._before[rank]}
        return {rank: RankStatus.from_text(self._before[rank]) for rank in sorted(self._silent)}
