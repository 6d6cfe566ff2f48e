"""The steps of the test, which both sites take in the same order."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import NamedTuple, TypeVar

from ldt.cli.link_check.conversation import Conversation
from ldt.cli.link_check.facts import (
    OTHER_PORTS,
    Advice,
    Arrived,
    Block,
    Door,
    Outcomes,
    Ping,
    Pong,
    Reached,
    RoundTrip,
    Sent,
)
from ldt.cli.link_check.host import facts_of, path_mtu
from ldt.cli.link_check.meeting import meet
from ldt.cli.link_check.report import Findings, Report
from ldt.errors import LdtError
from ldt.launch.description import Description
from ldt.launch.reach import listen, outcome_of
from ldt.runtime.comm import socket_dial
from ldt.runtime.comm.socket_choice import TcpLimits, TcpPath
from ldt.runtime.comm.socket_probe import NUM_PROBES, probe

__all__ = ["check_link"]

_PINGS = 10
_BLOCK_BYTES, _BLOCK_SECONDS = 64 << 10, 10.0
_PROBE_SECONDS = 30.0
_MARGIN_SECONDS = 10.0  # for the other site to end a step
_T = TypeVar("_T")


class Way(NamedTuple):
    """A direction in which connections open, and the port that they go to."""

    dials: str
    listens: str
    port: str


def check_link(description: Description, site: str, seconds: float) -> Report:
    """Test the link together with the other site, for which this one waits up to ``seconds``.

    Raises LdtError if the other site does not come, does not answer, or has another description.
    """
    if len(description.sites) != 2:
        raise LdtError(f"{description.path}: --link is for two sites, got {', '.join(description.sites)}")
    own = facts_of(description, site)
    address, port = description.sites[site].address, description.store[1]
    with ExitStack() as stack:
        servers = {str(port + 1): stack.enter_context(closing(listen(address, port + 1)))}
        servers[OTHER_PORTS] = stack.enter_context(closing(listen(address, 0)))
        if site == description.host:
            servers[str(port)] = stack.enter_context(closing(listen(address, port)))
        talk, theirs = meet(description, own, servers[str(port + 1)], seconds)
        stack.enter_context(closing(talk.connection))
        try:
            found = _Check(description, site, talk, servers).run(
                {host.site: host.limits for host in (own, theirs)}
            )
        except OSError as error:
            raise LdtError(
                f"the link to {talk.other} was lost during the test ({error.strerror or error}): is it down, or has "
                "the command ended there?"
            ) from error
        return Report(description, {own.site: own, theirs.site: theirs}, found)


class _Check:
    def __init__(
        self, description: Description, site: str, talk: Conversation, servers: Mapping[str, socket.socket]
    ) -> None:
        self._description, self._site, self._talk, self._servers = description, site, talk, servers
        self._sites = tuple(description.sites)

    def run(self, limits: Mapping[str, TcpLimits]) -> Findings:
        doors = self._both(Door(self._servers[OTHER_PORTS].getsockname()[1], secrets.token_hex(16)))
        reached = {
            site: self._checked(site, one.outcomes)
            for site, one in self._both(self._reach(doors[self._talk.other])).items()
        }
        round_trip = self._round_trip()
        lost = self._blocks()
        way = next(self._ways(reached), None)
        if way is None or lost is not None:
            return Findings(reached, round_trip, lost)
        sent = self._both(self._measure(way, doors))
        first, second = (sent[site].probe for site in self._sites)
        path = TcpPath.of([first], [second], [limits[site] for site in self._sites])
        advice = self._both(Advice(list(path.advice())))
        mtus = {site: one.path_mtu for site, one in sent.items()}
        return Findings(
            reached, round_trip, None, path, mtus, {site: one.sentences for site, one in advice.items()}
        )

    def _both(self, own: _T, seconds: float = _PROBE_SECONDS) -> dict[str, _T]:
        """What both sites have to say, this one ``own``."""
        self._talk.say(own)
        theirs = self._talk.hear(type(own), seconds + _MARGIN_SECONDS)
        return {site: own if site == self._site else theirs for site in self._sites}

    # -- ports ---------------------------------------------------------------------------------------------------

    def _reach(self, door: Door) -> Reached:
        """Dial the ports of the other site that a job may need, all at once."""
        ports = {name: door.port if name == OTHER_PORTS else int(name) for name in self._needed(self._site)}
        address = self._description.sites[self._talk.other].address
        with ThreadPoolExecutor(len(ports)) as threads:
            outcomes = threads.map(lambda port: outcome_of(address, port), ports.values())
            return Reached(dict(zip(ports, outcomes, strict=True)))

    def _needed(self, dials: str) -> list[str]:
        """What ``dials`` may have to reach of the other site."""
        store = self._description.store[1]
        known = [] if dials == self._description.host else [str(store), str(store + 1)]
        return [*known, OTHER_PORTS]

    def _checked(self, dials: str, outcomes: Outcomes) -> Outcomes:
        if list(outcomes) != self._needed(dials):
            raise LdtError(
                f"{dials} has tried other ports than expected: do both sites have the same version of ldt?"
            )
        return outcomes

    def _ways(self, reached: Mapping[str, Outcomes]) -> Iterator[Way]:
        """In which way connections may be opened to measure, the edge's to free ports first."""
        for port_is_free in (True, False):
            for dials, listens in (self._sites, self._sites[::-1]):
                for port, outcome in reached[dials].items():
                    if outcome == "connects" and (port == OTHER_PORTS) == port_is_free:
                        yield Way(dials, listens, port)

    # -- figures -------------------------------------------------------------------------------------------------

    def _round_trip(self) -> RoundTrip:
        """The first site measures. Its clock and the other's are compared at the middle of the fastest round trip."""
        if self._site != self._sites[0]:
            for _ in range(_PINGS):
                self._talk.hear(Ping)
                self._talk.say(Pong(time.time()))
            return self._talk.hear(RoundTrip)
        trips = []
        for _ in range(_PINGS):
            before, start = time.time(), time.perf_counter()
            self._talk.say(Ping())
            theirs = self._talk.hear(Pong).time
            seconds = time.perf_counter() - start
            trips.append(RoundTrip(seconds, theirs - before - seconds / 2))
        fastest = min(trips, key=lambda trip: trip.seconds)
        self._talk.say(fastest)
        return fastest

    def _blocks(self) -> str | None:
        """Send a block each way, which takes packets of full size. Returns the site whose block did not arrive."""
        for sends in self._sites:
            if self._site == sends:
                self._talk.say(Block("0" * _BLOCK_BYTES))
                arrived = self._talk.hear(Arrived, _BLOCK_SECONDS + _MARGIN_SECONDS).arrived
            else:
                arrived = self._arrives()
                self._talk.say(Arrived(arrived))
            if not arrived:
                return sends
        return None

    def _arrives(self) -> bool:
        try:
            self._talk.hear(Block, _BLOCK_SECONDS)
        except TimeoutError:
            return False
        return True

    def _measure(self, way: Way, doors: Mapping[str, Door]) -> Sent:
        """Fill the link in both directions, then load it lightly and count what is lost."""
        door, server = doors[way.listens], self._servers[way.port] if way.listens == self._site else None
        check = _limit(time.monotonic() + _PROBE_SECONDS)
        if server is not None:
            server.settimeout(0.05)
            found = socket_dial.accept(server, door.token, [(0, n) for n in range(NUM_PROBES)], check)
            connections = list(found.values())
        else:
            port = door.port if way.port == OTHER_PORTS else int(way.port)
            address = self._description.sites[way.listens].address
            offer = {"address": f"{address}:{port}", "token": door.token}
            connections = socket_dial.dial(0, {1: offer}, {1: range(NUM_PROBES)}, check)[1]
        with ExitStack() as stack:
            for connection in connections:
                stack.enter_context(closing(connection))
            return Sent(probe({1: connections}, check)[1], path_mtu(connections[0]))


def _limit(deadline: float) -> Callable[[str], None]:
    def check(problem: str) -> None:
        if time.monotonic() > deadline:
            raise LdtError(
                f"{problem} within {_PROBE_SECONDS:g} s: the link went down meanwhile, or it is too slow"
            )

    return check
