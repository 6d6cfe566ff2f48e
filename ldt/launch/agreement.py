"""What the launchers of all sites agree on, through a store of theirs: one description, one number of the attempt.

The launcher of the site with the port keeps two stores: this one for as long as the job lasts, at the next port, and
one of the ranks for each attempt. The key "attempt" has its number, or why the job is over. A launcher whose ranks
failed raises the number, if no other has; the others see that. An attempt begins when all sites have ended the one
before. What is read was written by another site: numbers and texts, limited in size.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any

from ldt.errors import LdtError
from ldt.launch.description import Description
from ldt.launch.reach import Outcome, dialling_site, listen, outcome_of
from ldt.launch.signals import Signals
from ldt.launch.store_thread import StoreThread
from ldt.launch.stores import reach, serve
from ldt.schema import fit
from ldt.untrusted import parse, plain

__all__ = ["Agreement", "JobOver"]

_POLL_SECONDS = 0.2
_LEAVE_SECONDS = 5.0  # for others to read that the job is over
_SILENCE_SECONDS = 2.0  # of a wait that nobody needs to know of
_MAX_REASON = 300
_DIALS = 4


class JobOver(Exception):  # noqa: N818 (the end may be a success elsewhere)
    """No attempt follows. The text says why."""


class Silence:
    """For how long a counter has not changed."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._since = 0.0

    def seconds(self, count: int) -> float:
        if count != self._count:
            self._count, self._since = count, time.monotonic()
        return time.monotonic() - self._since


class Agreement:
    """A launcher's part. ``timeout`` is how many seconds it waits for those of other sites."""

    def __init__(
        self,
        description: Description,
        site: str,
        max_restarts: int,
        timeout: float,
        signals: Signals,
        say: Callable[[str], None],
    ) -> None:
        self._description, self._site, self._say = description, site, say
        self._max_restarts, self._timeout, self._signals = max_restarts, timeout, signals
        self._is_host = site == description.host
        self._id = uuid.uuid4().hex
        self._attempt = 0
        self._over: str | None = None
        self._look: Future[list[bytes]] | None = None
        self._ranks_store: Any = None
        self._address, port = description.store
        self._port = port + 1
        self._store = StoreThread(f"{self._address} port {self._port}", signals)

    # -- the beginning ---------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Meet the launchers of all sites. Raises LdtError if one does not come or has another description."""
        self._open()
        site = self._site
        self._set(f"job/{site}", json.dumps(self._description.digests))
        self._set(f"launcher/{site}", self._id)
        starts = self._ask(lambda store: store.add(f"starts/{site}", 1))
        self._refresh()
        if starts > 1:  # a launcher of this site has ended, and its ranks with it
            self.fail(self._attempt, f"the launcher of {site} was started again")
        while not self._wait_for("job", "did not start", self._attempt):
            pass  # another attempt was announced
        found = self._ask(lambda store: store.multi_get(self._keys("job")))
        for other, text in zip(self._description.sites, found, strict=True):
            self._compare(other, text)

    def _open(self) -> None:
        if self._is_host:
            self._store.store = serve(self._store, self._address, self._port)
            self._set("attempt", "0")
            return
        self._store.store = reach(
            self._store, self._description, self._port, self._timeout, self._signals, self._say
        )

    def _compare(self, other: str, data: bytes) -> None:
        try:
            theirs = fit(parse(data), dict[str, str])
        except ValueError as error:
            raise LdtError(
                f"what the launcher of {other} says of its description is wrong: {error}"
            ) from error
        self._description.check_same(other, theirs)

    # -- attempts ----------------------------------------------------------------------------------------------------

    def meet(self) -> int:
        """Wait until all sites are ready for the next attempt and its store is there. Returns its number.

        Raises JobOver if there is none, LdtError if a site does not come.
        """
        while True:
            self._refresh()
            attempt, is_open = self._attempt, f"open/{self._attempt}"
            self._set(f"ready/{attempt}/{self._site}")
            if not (self._wait_for(f"ready/{attempt}", "is not ready", attempt) and self._reach(attempt)):
                continue
            if self._is_host:
                self._ranks_store = None  # its port is free again
                self._ranks_store = serve(self._store, self._address, self._port - 1)
                self._set(is_open)
            if self._wait([is_open], attempt):
                return attempt

    def _reach(self, attempt: int) -> bool:
        """Try the connections that gloo will need. False if another attempt was announced.

        Raises JobOver, at all sites, if they cannot be opened: gloo itself would wait for half an hour.
        """
        description, own = self._description, self._site
        with closing(listen(description.sites[own].address, 0)) as server:
            self._set(f"door/{attempt}/{own}", str(server.getsockname()[1]))
            if not self._wait_for(f"door/{attempt}", "is not ready", attempt):
                return False
            blocked = ""
            for other in description.sites:
                if other != own and dialling_site(description, own, other) == own:
                    outcome = self._try(other, _line(self._ask(partial(_get, f"door/{attempt}/{other}"))))
                    if outcome != "connects":
                        blocked = f"{own} cannot connect to {other} at ports that are free there ({outcome})"
            self._set(f"reach/{attempt}/{own}", blocked)
            if not self._wait_for(f"reach/{attempt}", "does not say whether it reaches the others", attempt):
                return False
        for found in map(_line, self._ask(lambda store: store.multi_get(self._keys(f"reach/{attempt}")))):
            if found:
                why = (
                    f"{found}, which gloo needs: python -m ldt doctor --link says what to change, and a tunnel "
                    "(python -m ldt tunnel) needs one UDP port of one site"
                )
                self.stop(why)  # another site may not have read what this one has
                raise JobOver(why)
        return True

    def _try(self, other: str, port: str) -> Outcome:
        """Several times, as the link may be down for a moment."""
        if not (port.isdecimal() and 0 < int(port[:6]) < 65536):
            raise LdtError(f"expected a port of {other}, got {port!r}")
        outcome: Outcome = "no answer"
        for _ in range(_DIALS):
            self._signals.check()
            outcome = outcome_of(self._description.sites[other].address, int(port[:6]))
            if outcome == "connects":
                break
        return outcome

    def moved(self, attempt: int) -> bool:
        """Whether another attempt was announced, or the end of the job. Does not wait for the network."""
        if self._look is None:
            self._look = self._store.submit(self._read)
        elif self._look.done():
            look, self._look = self._look, None
            try:
                self._note(self._store.result(look))
            except LdtError as error:
                self._over = str(error)
        return self._over is not None or self._attempt != attempt

    def fail(self, attempt: int, why: str) -> None:
        """Ask for the attempt after ``attempt``, or end the job if that was the last. Does not wait."""
        next_one = str(attempt + 1) if attempt < self._max_restarts else why
        self._store.submit(lambda store: store.compare_set("attempt", str(attempt), next_one))

    def stop(self, why: str) -> None:
        """End the job. Does not wait."""
        self._store.submit(lambda store: store.set("attempt", why))

    def finish(self, attempt: int) -> bool:
        """Wait until the ranks of all sites have succeeded. False if another attempt was announced.

        Their ranks may take as long as they like, but raises LdtError if a launcher is silent for ``timeout``.
        """
        self._set(f"done/{attempt}/{self._site}")
        silences: dict[str, Silence] = {}
        while not self._wait(self._keys(f"done/{attempt}"), attempt, time.monotonic() + _SILENCE_SECONDS):
            if self._attempt != attempt:
                return False
            if not silences:
                self._say("all ranks here have succeeded; waiting for those of other sites")
            for site in self._description.sites:
                silence = silences.setdefault(site, Silence()).seconds(self._ask(partial(_beats, site)))
                if silence > self._timeout and not self._has([f"done/{attempt}/{site}"]):
                    raise LdtError(
                        f"all ranks here have succeeded, but the launcher of {site} was silent for {self._timeout:g} s "
                        "and has not said the same: look at it"
                    )
        return True

    def leave(self) -> None:
        """Let others know that this launcher ends; the one that keeps the store waits a moment for the others."""
        if self._store.store is None:
            return
        try:
            self._ask(lambda store: store.set(f"left/{self._site}", "1"), heed_signals=False)
            deadline = time.monotonic() + _LEAVE_SECONDS
            while self._is_host and time.monotonic() < deadline:
                if self._ask(self._all_left, heed_signals=False):
                    return
                time.sleep(_POLL_SECONDS)
        except LdtError:
            pass  # the store is gone, and so are the others

    # -- the store -----------------------------------------------------------------------------------------------------

    def _ask(self, call: Callable[[Any], Any], heed_signals: bool = True) -> Any:
        return self._store.ask(call, self._timeout if heed_signals else _LEAVE_SECONDS, heed_signals)

    def _all_left(self, store: Any) -> bool:
        """Whether every site that has come has left."""
        return all(
            store.check([f"left/{site}"]) or not store.check([f"job/{site}"])
            for site in self._description.sites
        )

    def _set(self, key: str, value: str = "1") -> None:
        self._ask(lambda store: store.set(key, value))

    def _keys(self, prefix: str) -> list[str]:
        return [f"{prefix}/{site}" for site in self._description.sites]

    def _has(self, keys: list[str]) -> bool:
        return bool(self._ask(lambda store: store.check(keys)))

    def _read(self, store: Any) -> list[bytes]:
        store.add(f"alive/{self._site}", 1)
        return list(store.multi_get(["attempt", f"launcher/{self._site}"]))

    def _refresh(self) -> None:
        """Read where the job is. Raises JobOver if it is over."""
        self._note(self._ask(self._read))
        if self._over is not None:
            raise JobOver(self._over)

    def _note(self, found: list[bytes]) -> None:
        attempt, launcher = map(_line, found)
        if launcher != self._id:
            self._over = f"another launcher of {self._site} has taken its place"
        elif not (attempt.isdecimal() and len(attempt) < 10):
            self._over = attempt
        elif int(attempt) > self._max_restarts:
            self._over = (
                f"another site began attempt {attempt}, over --max-restarts {self._max_restarts} here"
            )
        else:
            self._attempt = max(self._attempt, int(attempt))

    def _wait(self, keys: list[str], attempt: int, deadline: float | None = None) -> bool:
        """Wait until all ``keys`` are there. False if another attempt was announced first, or at the ``deadline``."""
        while not self._has(keys):
            self._refresh()
            if self._attempt != attempt or (deadline is not None and time.monotonic() > deadline):
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _wait_for(self, prefix: str, problem: str, attempt: int) -> bool:
        """Wait until all sites have set their key. False if another attempt was announced first.

        Raises LdtError, naming the sites that have not, after ``timeout``.
        """
        began = time.monotonic()
        if self._wait(self._keys(prefix), attempt, min(began + _SILENCE_SECONDS, began + self._timeout)):
            return True
        if self._attempt == attempt:
            self._say("waiting for the launchers of other sites")
        if self._wait(self._keys(prefix), attempt, began + self._timeout):
            return True
        if self._attempt != attempt:
            return False
        missing = [site for site in self._description.sites if not self._has([f"{prefix}/{site}"])]
        if missing:
            late = " and ".join(missing)
            raise LdtError(f"{late} {problem} within {self._timeout:g} s: look at the launcher there")
        return True


def _get(key: str, store: Any) -> bytes:
    return bytes(store.get(key))


def _beats(site: str, store: Any) -> int:
    """How often the site's launcher has looked into the store."""
    return int(store.add(f"alive/{site}", 0))


def _line(data: bytes) -> str:
    """The beginning of a text that another site wrote, as one line."""
    return " ".join(plain(data[:_MAX_REASON].decode(errors="replace")).split())
