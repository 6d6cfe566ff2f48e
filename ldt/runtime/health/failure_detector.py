"""All by which a rank tells of a failure and learns of one: calls, progress, signs of life, the watch."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ldt._C import LaneError
from ldt.errors import LdtError, RemoteStageError, TransferError
from ldt.runtime.common.error_text import safe_isinstance, traceback_files
from ldt.runtime.common.managed import managed
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.common.redact import redacted, unredacted
from ldt.runtime.health.desync import CLOSED, EXITED, Desync, DesyncDetector
from ldt.runtime.health.hang_detector import HangDetector, of_lost_ranks, status_report
from ldt.runtime.health.heartbeat import Heartbeats, LivenessProbe
from ldt.runtime.health.progress import Progress
from ldt.runtime.health.watchdog import FailureReport, Watchdog

__all__ = ["MIN_HEARTBEAT_TIMEOUT", "FailureDetector", "HealthTimeouts", "is_secondary_error"]

# What a rank sees when it is another one that failed: worth a moment's wait for that one's report.
_CONSEQUENCES = (RemoteStageError, LaneError, dist.DistError)
_DISTRIBUTED = Path(dist.__file__).parent
_WAITING = tuple(
    str(_DISTRIBUTED / name) for name in ("distributed_c10d.py", "_functional_collectives.py", "fsdp")
)
_CALLING = str(_DISTRIBUTED.parent / "_ops.py")  # how Python gets from there into an operator
_OF_GLOO = re.compile(r"(Gloo connectFullMesh failed with )?\[[^]]*gloo/(transport|rendezvous)/")
_TELLING_SECONDS = 2.0
_LEAST_ANSWER_SECONDS = 10.0  # of the store, on machines that have much else to do
MIN_HEARTBEAT_TIMEOUT = timedelta(seconds=1)  # ranks leave a sign of life a few times a second
_CLOSING_SECONDS = 3.0  # in which a rank that closes its mesh ends all its connections
_USERS_CODE = "the code that uses the mesh"


@dataclass(frozen=True)
class HealthTimeouts:
    """How long a rank may be silent, and how long it may not get on, until it is taken for lost or hung."""

    heartbeat: timedelta = timedelta(seconds=30)
    stall: timedelta = timedelta(minutes=30)
    warn_after: timedelta = timedelta(seconds=60)


class FailureDetector:
    """Kept by each rank over its mesh, at ``place``. ``on_failure`` is called once, when the first failure is known.

    ``force_abort`` is called a second later, unless the mesh is closed by then: it ends what nothing else ends.
    ``overdue`` says which transfer takes too long, where no backend looks after it, and ``lost_connections`` how many
    of those to other ranks are closed.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        store: Any,
        key: str,
        timeouts: HealthTimeouts,
        *,
        shares_errors: bool,
        on_failure: Callable[[FailureReport], None],
        force_abort: Callable[[], None],
        overdue: Callable[[], str],
        lost_connections: Callable[[], int],
    ) -> None:
        self._rank_info = rank_info
        self._shares_errors = shares_errors
        self._overdue = overdue
        self._lost_connections = lost_connections
        self._known_losses = 0
        self._known_closed: frozenset[int] = frozenset()
        self._explained_until = 0.0
        self._probe: LivenessProbe | None = None
        stall = timeouts.stall.total_seconds()
        self._heartbeat_timeout = timeouts.heartbeat.total_seconds()
        self.progress = Progress()
        self.desync = DesyncDetector(f"{key}/call", rank_info.global_rank)
        self.heartbeats = Heartbeats(f"{key}/seen", rank_info.ranks, rank_info.global_rank, self.progress)
        self._hang_detector = HangDetector(
            rank_info,
            self.progress,
            self.heartbeats,
            warn_after=min(timeouts.warn_after.total_seconds(), stall / 2),
            limit=stall,
            shows_stack=shares_errors,
        )
        health_checks = (
            self._beat,
            self._compare_calls,
            self._find_overdue,
            self._look_after_connections,
            self._look_after_neighbour,
            self._hang_detector.look,
        )
        answer_seconds = max(self._heartbeat_timeout, _LEAST_ANSWER_SECONDS)
        self.watchdog = Watchdog(
            store, f"{key}/failure", on_failure, health_checks, force_abort, answer_seconds
        )
        self.watchdog.on_exit = self._exit

    @managed
    def calling(self, name: str) -> Iterator[None]:
        """Held around a collective call of all ranks. Raises LdtError within another one."""
        with ExitStack() as held:
            try:
                held.enter_context(self.desync.calling(name))
            except LdtError as error:
                if not self.desync.of_this_thread:  # nobody else would tell the others, who make this call
                    self.publish(error, name)
                raise
            held.enter_context(self.progress.calling(self.desync.current))
            yield

    def publish(self, error: BaseException, place: str = _USERS_CODE) -> FailureReport:
        """Report ``error`` unless another failure is known or comes to be known. Returns the first failure."""
        first = self.watchdog.first
        if first is None and self._may_follow(error):
            first = self._cause(error)
        if first is None:
            first = self.watchdog.publish(self._report_of(error, place))
        return first

    def lost(self, doing: str, error: BaseException) -> LdtError:
        """What to raise where a connection was lost: of the failure that this came of, if that comes to be known."""
        first = self.watchdog.first or self._cause(error)
        if first is not None:
            return first.as_error()
        return TransferError(f"lost the connection while {doing}: {error}")

    def shareable_text(self, error: BaseException) -> str:
        """What the other ranks may learn of ``error``: on the edge not what it may quote, unless errors are shared."""
        return unredacted(error)[0] if self._shares_errors else redacted(error)

    def stop(self, how: str = CLOSED) -> None:
        """Stop, and tell ranks that wait for this one, now or later."""

        def farewell(store: Any) -> FailureReport | None:
            self.progress.closed = True
            self.heartbeats.beat_now(store)
            return self._told(self.desync.leave(store, how))

        place = self._rank_info
        if self.watchdog.first is not None and place.global_rank == 0:
            # Its process may keep the store, and end next: then nobody could read any more what happened.
            self.watchdog.await_known(len(place.ranks), _TELLING_SECONDS)
        self.watchdog.leave(farewell)

    # -- what goes wrong elsewhere ---------------------------------------------------------------------------

    def _may_follow(self, error: BaseException) -> bool:
        """Whether ``error`` may have come of another rank's end: then that one is to blame.

        What the text of a user's error says does not matter. Layers also wait where torch's frames do not show.
        """
        return is_secondary_error(error) or (type(error) is RuntimeError and self._lost_connections() > 0)

    def _cause(self, error: BaseException) -> FailureReport | None:
        """The failure that ``error`` came of: told by another rank, or by its silence."""
        try:
            probe = self.heartbeats.probe_liveness(self.watchdog.store)
            told = self.watchdog.wait(probe.patience)
            missing = {} if told is not None else probe.missing(self.watchdog.store)
        except Exception:  # the store is gone as well: then that is the failure
            return self.watchdog.wait(2.0)
        if self.watchdog.first is not None or not missing:
            return self.watchdog.first
        noticed = f"rank {self._rank_info.global_rank} noticed: {self.shareable_text(error)}"
        return self.watchdog.publish(
            of_lost_ranks(self._rank_info, missing, f"for {probe.patience:g} s", noticed)
        )

    def _report_of(self, error: BaseException, place: str) -> FailureReport:
        me = self._rank_info
        report = FailureReport.of(
            error, me.global_rank, me.stage, me.replica, place, in_full=self._shares_errors
        )
        if not safe_isinstance(error, LaneError):
            return report
        return replace(
            report,
            error=f"{report.error}\nA transfer that may take as long needs connect(transfer_timeout=...). "
            f"What ranks were last seen doing:\n{self._picture()}",
        )

    def _picture(self) -> str:
        try:
            return status_report(
                self._rank_info, self.heartbeats.statuses(self.watchdog.store), self.progress
            )
        except Exception as error:
            return f"  the store does not tell: {error}"

    def _exit(self) -> None:
        """The interpreter ends, and the mesh was not closed: because of an exception, or by the script's end."""
        of_person = hasattr(sys, "ps1")  # who may have seen to it
        error = None if of_person else getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and self.watchdog.first is None:
            self.publish(error)
        self.stop(EXITED)

    # -- asked by the watch, again and again -----------------------------------------------------------------

    def _beat(self, store: Any) -> None:
        self.heartbeats.beat(store)

    def _compare_calls(self, store: Any) -> FailureReport | None:
        return self._told(self.desync.compare(store))

    def _told(self, desync: Desync | None) -> FailureReport | None:
        if desync is None:
            return None
        if desync.rank not in self._rank_info.ranks:
            return FailureReport.of_unknown(desync.text)
        node = self._rank_info.node_of(desync.rank)
        return FailureReport(desync.rank, node.stage, node.replica, "", desync.text)

    def _find_overdue(self, store: Any) -> FailureReport | None:
        """A device that has failed answers with an error, which is as good a reason."""
        try:
            late = self._overdue()
        except Exception as error:
            late = f"lanes cannot be asked what is under way: {type(error).__name__}: {error}"
        return FailureReport.of_unknown(late) if late else None

    def _look_after_connections(self, store: Any) -> FailureReport | None:
        """Where no rank waits for one that is gone, as it computes, or waits for its device."""
        lost = self._lost_connections()
        if self._probe is None and lost > self._known_losses:
            self._known_losses = lost
            probe = self.heartbeats.probe_liveness(store)
            if probe.closed != self._known_closed:  # these are connections of ranks that are just closing
                self._known_closed = probe.closed
                self._explained_until = time.monotonic() + _CLOSING_SECONDS
            if time.monotonic() > self._explained_until:
                self._probe = probe
        if self._probe is None or not self._probe.is_over:
            return None
        probe = self._probe
        missing = probe.missing(store)
        self._probe = None
        noticed = f"rank {self._rank_info.global_rank} noticed that connections to it were closed"
        return (
            of_lost_ranks(self._rank_info, missing, f"for {probe.patience:g} s", noticed) if missing else None
        )

    def _look_after_neighbour(self, store: Any) -> FailureReport | None:
        found = self.heartbeats.look_after_neighbour(store, self._heartbeat_timeout)
        if found is None:
            return None
        noticed = (
            f"Rank {self._rank_info.global_rank} noticed. If it may be silent for so long, as in a debugger, give "
            "connect a longer heartbeat_timeout."
        )
        return of_lost_ranks(self._rank_info, dict([found]), f"for {self._heartbeat_timeout:.0f} s", noticed)


def is_secondary_error(error: BaseException) -> bool:
    """Whether ``error`` may be what a rank sees when another one fails, with nothing to add to that one's report.

    gloo has no class of its own for a connection that was lost: it is known by where it was raised, in torch's own
    calls of collectives, and among what these raise by the file of gloo's that it begins with.
    """
    if type(error) is not RuntimeError:
        return safe_isinstance(error, _CONSEQUENCES)
    files = [file for file in traceback_files(error) if file != _CALLING]
    text = error.args[0] if error.args else None
    return bool(files) and files[-1].startswith(_WAITING) and type(text) is str and bool(_OF_GLOO.match(text))
