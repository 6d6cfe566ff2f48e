"""Runs a site's part of a job: attempt after attempt until all sites have succeeded or the job is over."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial

from torch.distributed.elastic.multiprocessing import SignalException

from ldt.errors import LdtError
from ldt.launch.agreement import Agreement, JobOver
from ldt.launch.description import Description
from ldt.launch.output import say
from ldt.launch.ranks import Ranks
from ldt.launch.signals import Interrupted, Signals

__all__ = ["supervise"]

_POLL_SECONDS = 0.05


class _Supervisor:
    def __init__(
        self, description: Description, site: str, max_restarts: int, grace: float, timeout: float
    ) -> None:
        self.failure: int | None = None
        self.signals = Signals()
        self.say: Callable[[str], None] = partial(say, site)
        self.agreement = Agreement(description, site, max_restarts, timeout, self.signals, self.say)
        self._description, self._site, self._grace = description, site, grace

    def run(self) -> None:
        """Return when all sites have succeeded. Raises JobOver, Interrupted or LdtError otherwise."""
        self.agreement.join()
        while True:
            attempt = self.agreement.meet()
            self._attempt(attempt)
            self.signals.check()
            if self.failure is None and self.agreement.finish(attempt):
                return

    def _attempt(self, attempt: int) -> None:
        """Run this site's ranks until all have ended, by themselves or because the attempt failed somewhere."""
        ranks = self._start(attempt)
        try:
            end = _End(self._grace)
            while ranks.running:
                time.sleep(_POLL_SECONDS)
                ranks.poll()
                self._look(ranks, attempt, end)
                if (number := end.due()) is not None:
                    ranks.send(number)
        finally:
            ranks.close()
        self.failure = ranks.failure

    def _start(self, attempt: int) -> Ranks:
        try:
            return Ranks(self._description, self._site, attempt, self.say)
        except SignalException as error:  # of torch's handlers
            self.signals.note(error.sigval)
            raise Interrupted(error.sigval.name) from error
        finally:
            self.signals.install()

    def _look(self, ranks: Ranks, attempt: int, end: _End) -> None:
        """Begin the end if a signal came, a rank failed, or another site asks for it."""
        if self.signals.first is not None:
            if not end.interrupts:
                self.agreement.stop(f"{signal.Signals(self.signals.first).name} at {self._site}")
            end.interrupt(self.signals.first, self.signals.count)
        elif not end.begun and ranks.failure is not None:
            self.agreement.fail(attempt, f"a rank of {self._site} failed in attempt {attempt}, the last one")
            end.begin()
        elif not end.begun and self.agreement.moved(attempt):
            end.begin()


class _End:
    """When which signal goes to the ranks.

    They have ``grace`` seconds to raise what they know of a failure, and as many from SIGTERM to SIGKILL.
    """

    def __init__(self, grace: float) -> None:
        self.begun = False
        self.interrupts = 0
        self._grace = grace
        self._steps: list[tuple[float, int]] = []  # seconds after the step before, signal
        self._since = 0.0

    def begin(self, *at_once: int) -> None:
        self.begun = True
        self._since = time.monotonic()
        self._steps = [(0.0, number) for number in at_once]
        self._steps += [(self._grace, signal.SIGTERM), (self._grace, signal.SIGKILL)]

    def interrupt(self, number: int, count: int) -> None:
        """Pass the first signal on; the second kills."""
        if count != self.interrupts:
            self.begin(number if count == 1 else signal.SIGKILL)
        self.interrupts = count

    def due(self) -> int | None:
        """Return the signal to send now, if any. One at a time, also after this process was stopped for long."""
        now = time.monotonic()
        if not self._steps or now < self._since + self._steps[0][0]:
            return None
        self._since = now
        return self._steps.pop(0)[1]


def supervise(description: Description, site: str, *, max_restarts: int, grace: float, timeout: float) -> int:
    """Start and watch the ranks of ``site``; see ``python -m ldt launch --help``. Returns the exit status.

    That is 0 if all sites have succeeded, that of this site's first rank that failed in the last attempt (128 and the
    signal's number if one killed it), 128 and the number of a signal that this process got, and 1 otherwise.
    """
    supervisor = _Supervisor(description, site, max_restarts, grace, timeout)
    with supervisor.signals:
        try:
            supervisor.run()
            status = 0
        except Interrupted as error:
            supervisor.agreement.stop(f"{error} at {site}")
            supervisor.say(f"ended by {error}")
            status = 128 + (supervisor.signals.first or 0)
        except (JobOver, LdtError) as error:
            supervisor.say(f"the job is over: {error}")
            if isinstance(error, LdtError):
                supervisor.agreement.stop(f"{site} gave up, see there")  # the text may name files of the site
            status = supervisor.failure or 1
        supervisor.agreement.leave()
    return status
