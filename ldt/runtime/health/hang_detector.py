"""When nothing gets on: a picture of all nodes for the log, and in the end the rank that all others wait for."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from ldt.plan.checks.error_context import error_context
from ldt.runtime.common.error_text import TRACEBACK_LINES
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.health.failure_report import FailureReport
from ldt.runtime.health.heartbeat import Heartbeats, LivenessProbe
from ldt.runtime.health.progress import Progress, RankStatus

__all__ = ["HangDetector", "of_lost_ranks", "status_report"]

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 2.0  # a rank that hangs can say best where, if it still can
_SHOWN = 32  # ranks


class HangDetector:
    """Asked again and again by the thread that watches for failures.

    Once this rank has not got on for ``limit`` seconds in a call, it calls the roll. Who does not answer is lost; else
    the rank that hangs is the one that has not got on for longest, of those that wait for nothing that the runtime
    knows of. It says so itself, with its stack, or, if it does not, the others do. After ``warn_after`` seconds
    leaders log a picture of all nodes, once for each call.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        progress: Progress,
        heartbeats: Heartbeats,
        *,
        warn_after: float,
        limit: float,
        shows_stack: bool,
    ) -> None:
        self._rank_info = rank_info
        self._progress = progress
        self._heartbeats = heartbeats
        self._warn_after = warn_after
        self._limit = limit
        self._shows_stack = shows_stack
        self._warned_of = ""
        self._probe: LivenessProbe | None = None

    def look(self, store: Any) -> FailureReport | None:
        """Who hangs, if somebody does."""
        call, seconds = self._progress.call, self._progress.seconds
        if not call or seconds < self._warn_after:
            self._probe = None
            return None
        if self._warned_of != call and self._rank_info.is_leader:
            self._warned_of = call
            self._warn(store, call, seconds)
        if seconds < self._limit:
            return None
        if self._probe is None:
            self._probe = self._heartbeats.probe_liveness(store)
        return self._judge(store, self._probe, seconds) if self._probe.is_over else None

    def _warn(self, store: Any, call: str, seconds: float) -> None:
        shown = status_report(self._rank_info, self._heartbeats.statuses(store), self._progress)
        me = self._rank_info.global_rank
        logger.warning("rank %d has not got on for %.0f s in %s\n%s", me, seconds, call, shown)

    def _judge(self, store: Any, probe: LivenessProbe, seconds: float) -> FailureReport | None:
        me = self._rank_info.global_rank
        missing = probe.missing(store)
        if missing:
            noticed = f"Rank {me} noticed as it has not got on for {seconds:.0f} s."
            return of_lost_ranks(self._rank_info, missing, f"for {probe.patience:g} s", noticed)
        statuses = self._heartbeats.statuses(store) | {me: self._progress.status()}
        busy = {rank: seen for rank, seen in statuses.items() if not (seen.is_waiting or seen.closed)}
        if any(seen.seconds < self._limit for seen in busy.values()):
            return None  # somebody works
        culprit = max(busy, key=lambda rank: busy[rank].seconds, default=None)
        if culprit == me:
            return self._of_this_rank(seconds)
        if seconds < self._limit + probe.patience + _GRACE_SECONDS:
            return None
        shown = status_report(self._rank_info, statuses, self._progress)
        if culprit is None:
            text = (
                f"no rank has got on for {self._limit:.0f} s, each waits for others (stall_timeout):\n{shown}"
            )
            return FailureReport.of_unknown(text)
        seen = busy[culprit]
        text = (
            f"no progress for {seen.seconds:.0f} s while others wait: it was last seen {seen.describe()}. If it works, "
            f"also between calls (data, validation, saving), give connect on all ranks a stall_timeout longer than "
            f"{self._limit:g} s\n{shown}"
        )
        return self._report(culprit, seen.place or seen.call or "the code between calls", text)

    def _of_this_rank(self, seconds: float) -> FailureReport:
        frame = sys._current_frames().get(self._progress.thread)
        stack = traceback.extract_stack(frame) if frame is not None else []
        where = (
            f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}"
            if stack
            else "a thread that has ended"
        )
        lines = "".join(traceback.format_list(stack)).splitlines()[-TRACEBACK_LINES:]
        return self._report(
            self._rank_info.global_rank,
            self._progress.place or self._progress.call,
            f"no progress for {seconds:.0f} s: it stands at {where}. Give connect a longer stall_timeout if it works",
            "\n".join(lines) if self._shows_stack else "",
        )

    def _report(self, rank: int, place: str, error: str, stack: str = "") -> FailureReport:
        node = self._rank_info.node_of(rank)
        return FailureReport(rank, node.stage, node.replica, place, error, None, stack)


def of_lost_ranks(
    rank_info: RankInfo, missing: Mapping[int, RankStatus], how_long: str, noticed: str
) -> FailureReport:
    """That the ranks ``missing`` give no sign of life, and how that was ``noticed``."""
    rank, seen = next(iter(missing.items()))
    node = rank_info.node_of(rank)
    others = f", nor of ranks {list(missing)[1:]}" if len(missing) > 1 else ""
    text = (
        f"no sign of life {how_long}{others}: its process was killed (out of memory?), has exited or is stopped, or "
        f"its host cannot be reached; look at its output and at its host's log. It was last seen {seen.describe()}. "
    )
    return FailureReport(rank, node.stage, node.replica, "", text + noticed)


def status_report(rank_info: RankInfo, statuses: Mapping[int, RankStatus], progress: Progress) -> str:
    """What each rank was last seen doing, a line for each, and where the nodes are in the plan that is run."""
    shown = list(rank_info.ranks[:_SHOWN])
    lines = [
        f"  {rank_info.describe(rank)}: {statuses[rank].describe() if rank in statuses else 'never seen'}"
        for rank in shown
    ]
    if len(shown) < len(rank_info.ranks):
        lines.append(f"  and {len(rank_info.ranks) - len(shown)} more ranks")
    leaders = {node: rank_info.ranks[rank_info.topology.leader_of(node)] for node in rank_info.topology.nodes}
    places = {
        node: statuses[leader].index
        for node, leader in leaders.items()
        if leader in shown and leader in statuses and statuses[leader].index >= 0
    }
    plan = progress.plan
    return "\n".join(lines + ([error_context(plan, places)] if plan is not None and places else []))
