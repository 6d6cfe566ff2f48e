"""When nothing gets on: a picture of all nodes for the log, and in the end the rank that all others wait for."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from ldt.plan.excerpt import excerpt
from ldt.runtime.disclosure import TRACEBACK_LINES
from ldt.runtime.heartbeat import Heartbeats
from ldt.runtime.place import Place
from ldt.runtime.progress import Progress, Sighting
from ldt.runtime.report import FailureReport

__all__ = ["StallWatch", "picture"]

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 2.0  # a rank that hangs can say best where, if it still can
_SHOWN = 32  # ranks


class StallWatch:
    """Asked again and again by the thread that watches for failures.

    A rank that is in a call, waits for nothing that the runtime knows of and does not get on for ``limit`` seconds is
    taken to hang. It says so itself, with its stack; if it cannot, or is outside of any call, those that wait for it
    do. After ``warn_after`` seconds leaders log a picture of all nodes, once for each call.
    """

    def __init__(
        self,
        place: Place,
        progress: Progress,
        heartbeats: Heartbeats,
        *,
        warn_after: float,
        limit: float,
        shows_stack: bool,
    ) -> None:
        self._place = place
        self._progress = progress
        self._heartbeats = heartbeats
        self._warn_after = warn_after
        self._limit = limit
        self._shows_stack = shows_stack
        self._warned_of = ""

    def look(self, store: Any) -> FailureReport | None:
        """Who hangs, if somebody does."""
        call, seconds = self._progress.call, self._progress.seconds
        if not call:
            return None
        if seconds > self._warn_after and self._warned_of != call and self._place.is_leader:
            self._warned_of = call
            sightings = self._heartbeats.sightings(store)
            logger.warning(
                "rank %d has not got on for %.0f s in %s\n%s",
                self._place.global_rank,
                seconds,
                call,
                picture(self._place, sightings, self._progress),
            )
        if seconds < self._limit:
            return None
        if not self._progress.sighting().is_waiting:
            return self._of_this_rank(seconds)
        return self._of_another(store) if seconds > self._limit + _GRACE_SECONDS else None

    def _of_this_rank(self, seconds: float) -> FailureReport:
        frame = sys._current_frames().get(self._progress.thread)
        stack = traceback.extract_stack(frame)
        where = f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}"
        lines = "".join(traceback.format_list(stack)).splitlines()[-TRACEBACK_LINES:]
        return self._report(
            self._place.global_rank,
            self._progress.place or self._progress.call,
            f"no progress for {seconds:.0f} s: it stands at {where}. Give connect a longer stall_timeout if it works",
            "\n".join(lines) if self._shows_stack else "",
        )

    def _of_another(self, store: Any) -> FailureReport | None:
        sightings = self._heartbeats.sightings(store)
        if any(not seen.is_waiting and seen.seconds < self._limit for seen in sightings.values()):
            return None  # somebody works
        shown = picture(self._place, sightings, self._progress)
        for rank, seen in sorted(sightings.items()):
            if not seen.is_waiting:
                text = f"no progress for {seen.seconds:.0f} s while others wait: it was last seen {seen.describe()}"
                return self._report(
                    rank, seen.place or seen.call or "the code between calls", f"{text}\n{shown}"
                )
        return FailureReport.of_unknown(
            f"no rank has got on for {self._limit:.0f} s, each waits for others:\n{shown}"
        )

    def _report(self, rank: int, place: str, error: str, stack: str = "") -> FailureReport:
        node = self._place.node_of(rank)
        return FailureReport(rank, node.stage, node.replica, place, error, None, stack)


def picture(place: Place, sightings: Mapping[int, Sighting], progress: Progress) -> str:
    """What each rank was last seen doing, a line for each, and where the nodes are in the plan that is run."""
    shown = list(place.ranks[:_SHOWN])
    lines = [
        f"  {place.describe(rank)}: {sightings[rank].describe() if rank in sightings else 'never seen'}"
        for rank in shown
    ]
    if len(shown) < len(place.ranks):
        lines.append(f"  and {len(place.ranks) - len(shown)} more ranks")
    leaders = {node: place.ranks[place.topology.leader_of(node)] for node in place.topology.nodes}
    places = {
        node: sightings[leader].index
        for node, leader in leaders.items()
        if leader in shown and leader in sightings and sightings[leader].index >= 0
    }
    plan = progress.plan
    return "\n".join(lines + ([excerpt(plan, places)] if plan is not None and places else []))
