"""What was found, as both sites print it: rows, problems with remedies, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ldt.cli.link_check.facts import OTHER_PORTS, HostFacts, Outcomes, RoundTrip
from ldt.launch.description import Description
from ldt.launch.reach import dialling_site
from ldt.runtime.comm.socket_choice import TcpPath, choose
from ldt.untrusted import plain

__all__ = ["Findings", "Problem", "Report"]

_TUNNEL = "take a tunnel (python -m ldt tunnel), which needs one UDP port of one site"
_SKEW_SECONDS = 1.0
_MAX_TEXT = 400


class Problem(NamedTuple):
    """Something that a job needs and the link has not, and the sentence that says what to change."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class Findings:
    """What both sites have found together. ``path`` is missing where nothing could be measured.

    Attributes:
        reached: How the ports of the other site answered to each site.
        round_trip: As the first site has measured it.
        lost_from: The site whose packets of full size do not arrive, if any.
        path: Round trip, rates and losses under load.
        path_mtus: What each site's kernel takes for the path's MTU; 0 if it does not say.
        advice: Commands that would help at each site.
    """

    reached: Mapping[str, Outcomes]
    round_trip: RoundTrip
    lost_from: str | None = None
    path: TcpPath | None = None
    path_mtus: Mapping[str, int] = field(default_factory=dict)
    advice: Mapping[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The findings of the sites of ``description``, whose hosts say that of themselves."""

    description: Description
    hosts: Mapping[str, HostFacts]
    found: Findings

    @property
    def _sites(self) -> tuple[str, str]:
        first, second = self.description.sites
        return first, second

    def rows(self) -> Iterator[tuple[str, str]]:
        """Subject and value, one line each."""
        first, second = self._sites
        for site, other in ((first, second), (second, first)):
            outcomes = self.found.reached[site].items()
            shown = "; ".join(f"{_port(port)}: {outcome}" for port, outcome in outcomes)
            yield f"{site} to {other}", shown
        yield "round trip", f"{self.found.round_trip.seconds * 1e3:.2f} ms"
        path = self.found.path
        if path is not None:
            for (site, other), rate in zip(((first, second), (second, first)), path.rates, strict=True):
                yield f"{site} to {other}", f"{rate * 8e-6:.0f} Mb/s"
            yield "loss", f"{path.loss:.2%} of packets" if path.loss else "none seen"
        yield "MTU", "; ".join(f"{site} {self._mtu(site)}" for site in self._sites)
        ahead = self.found.round_trip.ahead
        yield "clocks", f"{second if ahead > 0 else first} is {abs(ahead) * 1e3:.1f} ms ahead"
        for site in self._sites:
            host = self.hosts[site]
            yield site, ", ".join(_shown(f"{name} {value}") for name, value in host.versions.items())
            yield (
                f"TCP at {site}",
                _shown("; ".join(f"{name} {value}" for name, value in host.sysctls.items())),
            )

    def problems(self) -> Iterator[Problem]:
        """What a job cannot do without."""
        yield from self._closed_ports()
        lost, round_trip = self.found.lost_from, self.found.round_trip
        if lost is not None:
            yield Problem(
                f"packets of full size from {lost} do not arrive, small ones do.",
                "let routers on the way send ICMP 'fragmentation needed', or lower the MTU: mtu in [tunnel], or of "
                "the interface (ip link set dev NAME mtu 1280) on both hosts.",
            )
        if abs(round_trip.ahead) > _SKEW_SECONDS:
            yield Problem(
                f"the clocks differ by {abs(round_trip.ahead):.1f} s.",
                "set both by NTP (chrony, systemd-timesyncd), or logs of the sites cannot be compared.",
            )
        for name in ("ldt", "torch"):
            versions = {site: _shown(self.hosts[site].versions.get(name, "none")) for site in self._sites}
            public = {version.partition("+")[0] for version in versions.values()}  # behind the +: CPU or CUDA
            if len(public) > 1:
                shown = ", ".join(f"{version} at {site}" for site, version in versions.items())
                yield Problem(f"the versions of {name} differ: {shown}.", "install the same on both hosts.")

    def advice(self) -> Iterator[str]:
        """What would make steps faster."""
        path = self.found.path
        if path is not None:
            settings = choose(path, 0)
            if "connections" not in self.description.connect and (settings.connections > 1 or settings.bbr):
                found = "the link loses packets" if path.loss else "one connection does not fill the link"
                taken = f"{settings.connections}{' with bbr' if settings.bbr else ''}"
                yield f'connections = "auto" in [connect], on CPUs: {found}, and it takes {taken}.'
        for site in self._sites:
            for sentence in self.found.advice.get(site, []):
                yield f"at {site}, as root: {_shown(sentence)}"

    def _mtu(self, site: str) -> str:
        interface, path = self.hosts[site].mtu, self.found.path_mtus.get(site, 0)
        return f"{interface}, {path} on the way" if path not in (0, interface) else str(interface)

    def _closed_ports(self) -> Iterator[Problem]:
        description, host = self.description, self.description.host
        other = next(site for site in self._sites if site != host)
        port = description.store[1]
        outcomes = self.found.reached[other]
        closed = [name for name in (str(port), str(port + 1)) if outcomes[name] != "connects"]
        if closed:
            better = ""
            if self.found.reached[host][OTHER_PORTS] == "connects":
                better = (
                    f", give [sites.{other}] the port instead of [sites.{host}], as {host} reaches {other}"
                )
            yield Problem(
                f"{other} cannot connect to {host} at {'ports' if len(closed) > 1 else 'port'} {' and '.join(closed)} "
                f"({outcomes[closed[0]]}), where the store and the launchers meet.",
                f"let the firewall of {host} admit {other} to ports {port} and {port + 1}{better}, or {_TUNNEL}.",
            )
        dials = dialling_site(description, *self._sites)
        listens = next(site for site in self._sites if site != dials)
        outcome = self.found.reached[dials][OTHER_PORTS] if dials else "connects"
        if outcome != "connects":
            yield Problem(
                f"{dials} cannot connect to {listens} at the ports that are free there ({outcome}). Process groups "
                "listen on such ports, and gloo dials from the numerically larger address.",
                f"let the firewall of {listens} admit {dials} to the ports of net.ipv4.ip_local_port_range, "
                f"or {_TUNNEL}.",
            )
        first, second = self._sites
        outcome = self.found.reached[first][OTHER_PORTS]
        if "connections" in description.connect and first != dials and outcome != "connects":
            yield Problem(
                f"{first} cannot connect to {second} at the ports that are free there ({outcome}), which "
                "connections in [connect] needs.",
                f"let the firewall of {second} admit {first} to them, leave connections out, or {_TUNNEL}.",
            )


def _port(name: str) -> str:
    return name if name == OTHER_PORTS else f"port {name}"


def _shown(text: str) -> str:
    """A text of the other site, in one line."""
    return " ".join(plain(text, _MAX_TEXT).split())
