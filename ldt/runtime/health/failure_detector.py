"""Reports this rank's failures and detects those of others: desync, progress, heartbeats and the watchdog."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
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
from ldt.runtime.health.hang_detector import HangDetector, lost_ranks_report, status_report
from ldt.runtime.health.heartbeat import Heartbeats, LivenessProbe
from ldt.runtime.health.outages import LEAST_SECONDS, Outages
from ldt.runtime.health.progress import Progress, RankStatus
from ldt.runtime.health.watchdog import FailureReport, Watchdog

__all__ = ["MIN_HEARTBEAT_TIMEOUT", "FailureDetector", "HealthTimeouts", "is_secondary_error"]

# Errors that a rank raises when a peer fails: it waits a moment for that peer's report before it reports its own.
_SECONDARY_ERRORS = (RemoteStageError, LaneError, dist.DistError)
_DISTRIBUTED = Path(dist.__file__).parent
_COLLECTIVE_FILES = tuple(
    str(_DISTRIBUTED / name) for name in ("distributed_c10d.py", "_functional_collectives.py", "fsdp")
)
_OPERATOR_FILE = str(_DISTRIBUTED.parent / "_ops.py")  # the frame between those files and an operator
_GLOO_ERROR = re.compile(r"(Gloo connectFullMesh failed with )?\[[^]]*gloo/(transport|rendezvous)/")
_ACKNOWLEDGE_SECONDS = 2.0
_MIN_STORE_TIMEOUT = timedelta(seconds=10)  # on busy machines the store answers late
MIN_HEARTBEAT_TIMEOUT = timedelta(seconds=1)  # ranks send a heartbeat a few times a second
_CLOSING_SECONDS = 3.0  # time a rank takes to close all its connections when it closes its mesh
_USER_CODE = "the code that uses the mesh"


@dataclass(frozen=True)
class HealthTimeouts:
    """Time without a heartbeat until a rank is reported dead, and without progress until it is reported hung.

    A link between sites may be down for ``outage`` meanwhile.
    """

    heartbeat: timedelta = timedelta(seconds=30)
    stall: timedelta = timedelta(minutes=30)
    warn_after: timedelta = timedelta(seconds=60)
    outage: timedelta = timedelta(0)

    @property
    def recovery(self) -> timedelta:
        """From the beginning of an outage until TCP sends again: the pauses between its attempts double."""
        return 2 * self.outage

    @property
    def silence(self) -> timedelta:
        """After which a rank is reported dead."""
        return self.heartbeat + self.recovery

    @property
    def store(self) -> timedelta:
        """After which a store that does not answer is lost."""
        return max(self.silence, _MIN_STORE_TIMEOUT)


class FailureDetector:
    """One rank's failure detector.

    Args:
        rank_info: This rank's position in the topology.
        store: The mesh's store. Keys of the detector start with ``key``.
        timeouts: See ``HealthTimeouts``.
        shares_errors: Whether other ranks get this rank's errors in full.
        on_failure: Called once, when the first failure is known.
        force_abort: Called a second later unless the mesh is closed by then. Ends the waits that nothing else ends.
        overdue: Describes a transfer that exceeds its timeout, where no backend enforces it.
        lost_connections: The addresses at the other ends of closed connections to other ranks.
        addresses: Where each rank listens, if known.
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
        lost_connections: Callable[[], list[str]],
        addresses: Mapping[int, str] | None = None,
    ) -> None:
        self._rank_info = rank_info
        self._shares_errors = shares_errors
        self._overdue = overdue
        self._lost_connections = lost_connections
        self._addresses = addresses or {}
        self.followed = False  # by other ranks: then only ``ldt.Leader`` makes collective calls
        self._seen_losses = 0
        self._seen_closed: frozenset[int] = frozenset()
        self._explained_until = 0.0
        self._probe: LivenessProbe | None = None
        stall = timeouts.stall.total_seconds()
        self._silence = timeouts.silence.total_seconds()
        self._store_timeout = timeouts.store.total_seconds()
        self.outages = Outages(rank_info, bool(timeouts.outage))
        self.progress = Progress()
        self.desync = DesyncDetector(f"{key}/call", rank_info.global_rank)
        self.heartbeats = Heartbeats(
            f"{key}/seen",
            rank_info.ranks,
            rank_info.global_rank,
            self.progress,
            self.outages.answered,
            self.outages.other_sites().values(),
        )
        self._hang_detector = HangDetector(
            rank_info,
            self.progress,
            self.heartbeats,
            warn_after=min(timeouts.warn_after.total_seconds(), stall / 2),
            limit=stall,
            shows_stack=shares_errors,
        )
        self.watchdog = Watchdog(
            store,
            f"{key}/failure",
            on_failure,
            self._health_checks(),
            force_abort,
            self._store_timeout,
            extra_wait=timeouts.recovery.total_seconds(),
            on_answer=partial(self.outages.answered, rank_info.store_rank),
            lost_text=self._store_lost_text,
        )
        self.watchdog.on_exit = self._exit

    @managed
    def calling(self, name: str) -> Iterator[None]:
        """Wraps a collective call of all ranks. Raises LdtError inside another one, and beside ``ldt.Leader``."""
        with ExitStack() as held:
            try:
                if self.followed:
                    raise LdtError(
                        f"the edge called {name} itself: while other ranks follow it, it must call those of "
                        "ldt.Leader, or close that first"
                    )
                held.enter_context(self.desync.calling(name))
            except LdtError as error:
                if not self.desync.in_this_thread:  # the other ranks wait in this call
                    self.publish(error, name)
                raise
            held.enter_context(self.progress.calling(self.desync.current))
            yield

    def publish(self, error: BaseException, place: str = _USER_CODE) -> FailureReport:
        """Report ``error`` unless another failure came first. Returns the first failure."""
        first = self.watchdog.first
        if first is None and self._may_be_secondary(error):
            first = self._cause(error)
        if first is None:
            first = self.watchdog.publish(self._report_of(error, place))
        return first

    def lost(self, doing: str, error: BaseException) -> LdtError:
        """The error to raise for a lost connection: the failure that caused it, if one becomes known."""
        first = self.watchdog.first or self._cause(error)
        if first is not None:
            return first.as_error()
        return TransferError(f"lost the connection while {doing}: {error}")

    def shareable_text(self, error: BaseException) -> str:
        """The text of ``error`` for other ranks: in full where errors are shared, else redacted."""
        return unredacted(error)[0] if self._shares_errors else redacted(error)

    def stop(self, how: str = CLOSED) -> None:
        """Stop, and tell the ranks that wait for this one, now or later. Raises LdtError if others follow this one."""

        def announce_exit(store: Any) -> FailureReport | None:
            self.progress.closed = True
            self.heartbeats.beat_now(store)
            return self._desync_report(self.desync.finish(store, how))

        early: LdtError | None = None
        if self.followed and self.watchdog.first is None and how == CLOSED:
            early = LdtError("the mesh was closed before the ldt.Leader that other ranks follow")
            self.publish(early, "close()")
        if self.watchdog.first is not None and self._rank_info.global_rank == 0:
            # Rank 0 may host the store and exit next: give the others time to read the report.
            self.watchdog.wait_acknowledged(len(self._rank_info.ranks), _ACKNOWLEDGE_SECONDS)
        self.watchdog.stop(announce_exit)
        if early is not None:
            raise early

    # -- failures of other ranks -----------------------------------------------------------------------------

    def _may_be_secondary(self, error: BaseException) -> bool:
        """Whether ``error`` may be the consequence of another rank's failure.

        The text of a user's error does not count. A lost connection does: layers also wait in code that is not torch's.
        """
        return is_secondary_error(error) or (type(error) is RuntimeError and bool(self._lost_connections()))

    def _cause(self, error: BaseException) -> FailureReport | None:
        """The failure that caused ``error``: one that another rank reports, or the death of a rank."""
        try:
            probe = self.heartbeats.probe_liveness(self.watchdog.store)
            reported = self.watchdog.wait(probe.timeout)
            missing = {} if reported is not None else self._lost_of(probe, self.watchdog.store)
        except Exception:  # the store is gone, too: that is the failure
            return self.watchdog.wait(2.0)
        if self.watchdog.first is not None or not missing:
            return self.watchdog.first
        detected = f"Detected by rank {self._rank_info.global_rank}: {self.shareable_text(error)}"
        return self.watchdog.publish(self._lost_report(missing, probe.timeout, detected))

    def _report_of(self, error: BaseException, place: str) -> FailureReport:
        me = self._rank_info
        report = FailureReport.of(
            error, me.global_rank, me.stage, me.replica, place, in_full=self._shares_errors
        )
        if not safe_isinstance(error, LaneError):
            return report
        return replace(
            report,
            error=f"{report.error}\nIf a transfer may take this long, pass connect a longer transfer_timeout. "
            f"The ranks' last status:\n{self._status_report()}",
        )

    def _status_report(self) -> str:
        try:
            return status_report(
                self._rank_info, self.heartbeats.statuses(self.watchdog.store), self.progress
            )
        except Exception as error:
            return f"  unknown, as the store does not answer: {error}"

    def _exit(self) -> None:
        """Called at interpreter exit if the mesh was not closed, with or without an exception."""
        is_interactive = hasattr(sys, "ps1")  # last_value may be an exception that the user has handled
        error = None if is_interactive else getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and self.watchdog.first is None:
            self.publish(error)
        self.stop(EXITED)

    # -- health checks, polled by the watchdog ---------------------------------------------------------------

    def _health_checks(self) -> tuple[Callable[[Any], FailureReport | None], ...]:
        return (
            self._beat,
            self._compare_calls,
            self._find_overdue,
            self._check_connections,
            self._check_neighbour,
            self._hang_detector.check,
        )

    def _beat(self, store: Any) -> None:
        self.heartbeats.beat(store)

    def _compare_calls(self, store: Any) -> FailureReport | None:
        return self._desync_report(self.desync.compare(store))

    def _desync_report(self, desync: Desync | None) -> FailureReport | None:
        if desync is None:
            return None
        if desync.rank not in self._rank_info.ranks:
            return FailureReport.of_unknown(desync.text)
        node = self._rank_info.node_of(desync.rank)
        return FailureReport(desync.rank, node.stage, node.replica, "", desync.text)

    def _find_overdue(self, store: Any) -> FailureReport | None:
        """Report an overdue transfer. A failed device raises here, which is reported as well."""
        try:
            late = self._overdue()
        except Exception as error:
            late = f"cannot query the lanes for overdue transfers: {type(error).__name__}: {error}"
        return FailureReport.of_unknown(late) if late else None

    def _check_connections(self, store: Any) -> FailureReport | None:
        """Find dead ranks by closed connections, also while this rank computes or waits for its device.

        If all are alive and none has closed its mesh, a connection was reset, and nobody may ever wait for it here.
        """
        lost = self._lost_connections()
        if self._probe is None and len(lost) > self._seen_losses:
            self._seen_losses = len(lost)
            probe = self.heartbeats.probe_liveness(store)
            if probe.closed != self._seen_closed:  # the closed connections belong to ranks that are closing
                self._seen_closed = probe.closed
                self._explained_until = time.monotonic() + _CLOSING_SECONDS
            if time.monotonic() > self._explained_until:
                self._probe = probe
        if self._probe is None or not self._probe.is_over:
            return None
        probe = self._probe
        missing = self._lost_of(probe, store)
        self._probe = None
        me = self._rank_info.global_rank
        detected = f"Detected by rank {me}, whose connections were closed"
        if not missing:
            return None if probe.closed else FailureReport.of_unknown(self._reset_text(lost))
        return self._lost_report(missing, probe.timeout, detected)

    def _lost_report(self, missing: Mapping[int, RankStatus], seconds: float, detected: str) -> FailureReport:
        """Name the link to a site that was silent before it closed its connections, as ranks there could not go on."""
        for site, rank in self.outages.other_sites().items():
            silent = self.heartbeats.silence(rank)
            if self.outages.ranks_of(site) <= missing.keys() and silent >= seconds + LEAST_SECONDS:
                return FailureReport.of_unknown(self.outages.text(site, silent, self._silence))
        return lost_ranks_report(self._rank_info, missing, f"for {seconds:g} s", detected)

    def _reset_text(self, lost: Sequence[str]) -> str:
        me, own = self._rank_info, self._rank_info.site_of(self._rank_info.global_rank)
        hosts = {peer.rpartition(":")[0] for peer in lost}
        near = [rank for rank, address in self._addresses.items() if address.rpartition(":")[0] in hosts]
        sites = ", ".join(sorted({str(me.site_of(rank)) for rank in near} - {str(own)}))
        link = f"the link between site {own} and site {sites} was down for too long, or " if sites else ""
        return (
            f"{link}connections were reset: rank {me.global_rank} lost those to {', '.join(sorted({*lost}))} while all "
            "ranks are alive, and gloo cannot make them again. Look for a firewall or NAT in between that restarted or "
            "forgot connections that were idle. Then continue from a checkpoint, with mesh.reconnect() or a restart"
        )

    def _lost_of(self, probe: LivenessProbe, store: Any) -> dict[int, RankStatus]:
        """The ranks whose loss closed a connection: those here, if any, as others may be behind an outage."""
        missing = probe.missing(store)
        here = {rank: seen for rank, seen in missing.items() if self.outages.site_of(rank) is None}
        return here or missing

    def _store_lost_text(self, silent: float) -> str:
        site = self.outages.site_of(self._rank_info.store_rank)
        if silent < self._store_timeout:  # its host has closed the connection
            return ""
        return "" if site is None else self.outages.text(site, silent, self._silence)

    def _check_neighbour(self, store: Any) -> FailureReport | None:
        found = self.heartbeats.check_neighbour(store, self._silence)
        if found is None:
            return None
        site = self.outages.site_of(found[0])
        if site is not None:
            probe = self.heartbeats.probe_liveness(store)
            time.sleep(probe.timeout)
            if self.outages.ranks_of(site) <= probe.missing(store).keys():
                silent = self._silence + probe.timeout
                return FailureReport.of_unknown(self.outages.text(site, silent, self._silence))
        detected = (
            f"Detected by rank {self._rank_info.global_rank}. If a rank may pause this long, as in a debugger, pass "
            "connect a longer heartbeat_timeout."
        )
        return lost_ranks_report(self._rank_info, dict([found]), f"for {self._silence:.0f} s", detected)


def is_secondary_error(error: BaseException) -> bool:
    """Whether ``error`` may only be the consequence of another rank's failure, and adds nothing to its report.

    gloo has no error class for a lost connection. It is recognized by where it was raised, in torch's own code for
    collectives, and by the gloo source file that its text starts with.
    """
    if type(error) is not RuntimeError:
        return safe_isinstance(error, _SECONDARY_ERRORS)
    files = [file for file in traceback_files(error) if file != _OPERATOR_FILE]
    text = error.args[0] if error.args else None
    return (
        bool(files)
        and files[-1].startswith(_COLLECTIVE_FILES)
        and type(text) is str
        and bool(_GLOO_ERROR.match(text))
    )
