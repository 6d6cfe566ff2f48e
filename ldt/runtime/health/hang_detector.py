"""Detects hangs: logs a status report of all nodes, then names the rank that the others wait for."""

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

__all__ = ["HangDetector", "lost_ranks_report", "status_report"]

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 2.0  # a hung rank knows best where it hangs, so it reports first
_SHOWN_RANKS = 32


class HangDetector:
    """Polled by the watchdog thread.

    Once this rank has made no progress in a call for ``limit`` seconds, it probes all ranks. Ranks that do not answer
    are reported dead; otherwise the longest-idle rank that is not waiting on a peer is reported hung. That rank
    reports itself, with its stack; if it does not, the others report it. After ``warn_after`` seconds each leader logs
    a status report of all nodes, once per call.
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

    def check(self, store: Any) -> FailureReport | None:
        """The report of a rank that hangs, if there is one."""
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
        return self._find_culprit(store, self._probe, seconds) if self._probe.is_over else None

    def _warn(self, store: Any, call: str, seconds: float) -> None:
        shown = status_report(self._rank_info, self._heartbeats.statuses(store), self._progress)
        me = self._rank_info.global_rank
        logger.warning("rank %d has made no progress for %.0f s in %s\n%s", me, seconds, call, shown)

    def _find_culprit(self, store: Any, probe: LivenessProbe, seconds: float) -> FailureReport | None:
        me = self._rank_info.global_rank
        missing = probe.missing(store)
        if missing:
            detected = f"Detected by rank {me}, which has made no progress for {seconds:.0f} s."
            return lost_ranks_report(self._rank_info, missing, f"for {probe.timeout:g} s", detected)
        statuses = self._heartbeats.statuses(store) | {me: self._progress.status()}
        busy = {rank: seen for rank, seen in statuses.items() if not (seen.is_waiting or seen.closed)}
        if any(seen.seconds < self._limit for seen in busy.values()):
            return None  # a rank is still working
        culprit = max(busy, key=lambda rank: busy[rank].seconds, default=None)
        if culprit == me:
            return self._of_this_rank(seconds)
        if seconds < self._limit + probe.timeout + _GRACE_SECONDS:
            return None
        shown = status_report(self._rank_info, statuses, self._progress)
        if culprit is None:
            return FailureReport.of_unknown(
                f"no rank has made progress for {self._limit:.0f} s (stall_timeout); each waits for another:\n{shown}"
            )
        seen = busy[culprit]
        text = (
            f"no progress for {seen.seconds:.0f} s while others wait: it was last seen {seen.describe()}. If it is "
            "busy (loading data, validating or saving between calls counts, too), pass connect on all ranks a "
            f"stall_timeout longer than {self._limit:g} s\n{shown}"
        )
        return self._report(culprit, seen.action or seen.call or "the code between calls", text)

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
            self._progress.action or self._progress.call,
            f"no progress for {seconds:.0f} s: it is at {where}. If it is busy, pass connect a longer stall_timeout",
            "\n".join(lines) if self._shows_stack else "",
        )

    def _report(self, rank: int, place: str, error: str, stack: str = "") -> FailureReport:
        node = self._rank_info.node_of(rank)
        return FailureReport(rank, node.stage, node.replica, place, error, None, stack)


def lost_ranks_report(
    rank_info: RankInfo, missing: Mapping[int, RankStatus], how_long: str, detected: str
) -> FailureReport:
    """The report that the ranks ``missing`` are dead. ``detected`` says how that was found."""
    rank, seen = next(iter(missing.items()))
    node = rank_info.node_of(rank)
    others = f", nor from ranks {list(missing)[1:]}" if len(missing) > 1 else ""
    text = (
        f"no heartbeat {how_long}{others}: its process was killed (out of memory?), exited or is stopped, or its host "
        f"is unreachable; check its output and its host's log. It was last seen {seen.describe()}. "
    )
    return FailureReport(rank, node.stage, node.replica, "", text + detected)


def status_report(rank_info: RankInfo, statuses: Mapping[int, RankStatus], progress: Progress) -> str:
    """The last status of each rank, one per line, and the position of each node in the running plan."""
    shown = list(rank_info.ranks[:_SHOWN_RANKS])
    lines = [
        f"  {rank_info.describe(rank)}: {statuses[rank].describe() if rank in statuses else 'never seen'}"
        for rank in shown
    ]
    if len(shown) < len(rank_info.ranks):
        lines.append(f"  and {len(rank_info.ranks) - len(shown)} more ranks")
    leaders = {node: rank_info.ranks[rank_info.topology.leader_of(node)] for node in rank_info.topology.nodes}
    indices = {
        node: statuses[leader].index
        for node, leader in leaders.items()
        if leader in shown and leader in statuses and statuses[leader].index >= 0
    }
    plan = progress.plan
    return "\n".join(lines + ([error_context(plan, indices)] if plan is not None and indices else []))
