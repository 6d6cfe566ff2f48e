"""The description of a job, ``job.toml``: which sites there are, which ranks run where, and what they run.

The tables and their keys are the dataclasses of this module; the topology's are the arguments of ``ldt.Topology``,
the link's those of ``ldt.connect``.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ldt.errors import LdtError, TopologyError
from ldt.schema import fit_fields, suggestion
from ldt.topology import Topology
from ldt.untrusted import plain, quoted, read_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ConnectOptions", "Description", "SiteTable", "TunnelTable", "read"]

_MAX_BYTES = 1 << 20
_MAX_SHOWN = 300
_LINK = re.compile(r"[0-9]{1,9}-[0-9]{1,9}")
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_%-]{0,252}")
_INTERFACE = re.compile(r"[^\s/]{1,64}")
_WIREGUARD_INTERFACE = re.compile(r"[A-Za-z0-9_=+.-]{1,15}")
_ENDPOINT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")
_MTU = range(1280, 65456)  # IPv6 needs the least, WireGuard adds 80
_MAX_PORT = 65534  # the launchers use the next one
_T = TypeVar("_T")


@dataclass(frozen=True)
class SiteTable:
    """A table of ``[sites]``: where the site's ranks are reached, and what they compute on."""

    address: str  # at which the other sites reach this one
    interface: str  # the network interface that has this address
    port: int | None = None  # of the process group's store; launchers meet at the next. One site has it
    device: Literal["cpu", "cuda", "npu"] = "cpu"  # one for each rank
    # Arguments of Python at this site, in place of the script and its arguments.
    command: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ConnectOptions:
    """The table ``[connect]``: arguments of ``ldt.connect``. Floats are seconds; a link is written as "0-1"."""

    backend: str | None = None
    lanes: str = ""
    transfer: str | dict[str, str] = ""
    transport: str = ""
    compression: str | dict[str, dict[str, str]] = ""
    timeout: float = 0.0
    transfer_timeout: float = 0.0
    heartbeat_timeout: float = 0.0
    stall_timeout: float = 0.0
    outage: float = 0.0
    share_edge_errors: bool = False
    connections: int | str = ""


@dataclass(frozen=True)
class _CompressionTable:
    """A table of ``compression``: arguments of ``ldt.Compression``."""

    activations: str = ""
    gradients: str = ""


@dataclass(frozen=True)
class TunnelTable:
    """The table ``[tunnel]``: WireGuard between two sites, whose addresses are those in it. The first stage's dials."""

    endpoint: str  # host:port, UDP, at which the other site is dialled
    mtu: int = 1420  # bytes of a packet in the tunnel: 80 fewer than outside


@dataclass(frozen=True)
class _TopologyTable:
    tp: list[int]
    dp: int = 1
    edge_dp: int | None = None
    laps: int | None = None
    placement: list[int] | None = None
    sites: list[str] | None = None  # of each stage; default: "edge" for the first, "cloud" for all others


@dataclass(frozen=True)
class _Tables:
    script: str
    topology: dict[str, Any]
    sites: dict[str, dict[str, Any]]
    arguments: list[str] = field(default_factory=list)
    connect: dict[str, Any] = field(default_factory=dict)
    tunnel: dict[str, Any] | None = None


@dataclass(frozen=True)
class Description:
    """A job that was read and checked. ``connect`` has the options that the file gives, as it writes them."""

    path: Path
    script: Path
    arguments: tuple[str, ...]
    topology: Topology
    sites: dict[str, SiteTable]
    connect: dict[str, Any]
    tunnel: TunnelTable | None
    digests: dict[str, str]  # of each table, to compare with those of other sites

    @property
    def host(self) -> str:
        """The site that keeps the store."""
        return next(name for name, site in self.sites.items() if site.port is not None)

    @property
    def store(self) -> tuple[str, int]:
        """The address and port of the process group's store."""
        site = self.sites[self.host]
        return site.address, site.port or 0

    def command_of(self, site: str) -> tuple[str, ...]:
        """The arguments of Python at ``site``."""
        return tuple(self.sites[site].command) or (str(self.script), *self.arguments)

    def site_of(self, rank: int) -> str:
        """The name of the site of ``rank``."""
        return str(self.topology.sites[self.topology.node_of(rank).stage])

    def check_site(self, site: str) -> None:
        """Raise LdtError unless ``site`` is one of the sites."""
        if site not in self.sites:
            raise LdtError(f"{self.path}: --site must be one of {', '.join(self.sites)}, got {site!r}")

    def check_same(self, other: str, digests: dict[str, str]) -> None:
        """Raise LdtError that names the tables that are not those of ``other``, which sent its ``digests``."""
        names = sorted({*self.digests, *digests})
        differing = ", ".join(name for name in names if self.digests.get(name) != digests.get(name))
        if differing:
            shown = " ".join(plain(differing, _MAX_SHOWN).split())
            raise LdtError(
                f"{self.path}: {shown} must be the same on all sites, but differs at {other}: copy one file to both"
            )

    def ranks_of(self, site: str) -> list[int]:
        """The ranks of ``site``, in order: their local ranks are the indices."""
        return [rank for rank in range(self.topology.world_size) if self.site_of(rank) == site]


def read(path: str | os.PathLike[str]) -> Description:
    """Read and check a description. Raises LdtError that names the file, the table and the key."""
    file = Path(path)
    try:
        return _describe(file.absolute(), tomllib.loads(read_file(file, _MAX_BYTES).decode("utf-8-sig")))
    except OSError as error:
        raise LdtError(f"{file} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise LdtError(f"{file}: it is nested too deeply") from None
    except ValueError as error:  # includes TOMLDecodeError and UnicodeDecodeError
        raise LdtError(f"{file}: {error}") from error


def _describe(path: Path, found: dict[str, Any]) -> Description:
    tables = _Tables(**fit_fields(found, _Tables, "the file"))
    topology = _topology(tables.topology)
    sites = {name: _site(name, table) for name, table in tables.sites.items()}
    stages = list(dict.fromkeys(map(str, topology.sites)))
    for name in sorted({*sites} - {*stages}) + sorted({*stages} - {*sites}):
        meant = suggestion(name, {*stages} - {*sites})
        what = f"is the site of no stage{meant}" if name in sites else "is missing"
        raise ValueError(f"[sites.{name}] {what}: the stages are at {', '.join(stages)}")
    hosts = [name for name, site in sites.items() if site.port is not None]
    if len(hosts) != 1:
        raise ValueError(
            f"[sites]: one site keeps the store and has a port, got {' and '.join(hosts) or 'none'}: "
            "give the one that all others can reach, for example port = 29500"
        )
    return Description(
        path=path,
        script=path.parent / tables.script,
        arguments=tuple(tables.arguments),
        topology=topology,
        sites={name: sites[name] for name in stages},
        connect=_in_table("connect", lambda: _options(tables.connect)),
        tunnel=None if tables.tunnel is None else _tunnel(tables.tunnel, sites),
        digests={name: _digest(value) for name, value in found.items()},
    )


def _topology(table: dict[str, Any]) -> Topology:
    given = _in_table("topology", lambda: _TopologyTable(**fit_fields(table, _TopologyTable)))
    given = replace(given, sites=given.sites or ["edge", *["cloud"] * (len(given.tp) - 1)])
    return _in_table("topology", lambda: Topology(**vars(given)))


def _site(name: str, table: dict[str, Any]) -> SiteTable:
    where = f"sites.{name}"
    site = _in_table(where, lambda: SiteTable(**fit_fields(table, SiteTable)))
    wrong = {
        "address": (not _ADDRESS.fullmatch(site.address), "a host name or an IP address"),
        "interface": (not _INTERFACE.fullmatch(site.interface), "the name of a network interface"),
        "command": (not all(site.command), "a list of texts that are not empty"),
        "port": (site.port is not None and not 1 <= site.port <= _MAX_PORT, f"from 1 to {_MAX_PORT}"),
    }
    for key, (is_wrong, expected) in wrong.items():
        if is_wrong:
            raise ValueError(f"[{where}] {key} must be {expected}, got {quoted(getattr(site, key))}")
    return site


def _tunnel(table: dict[str, Any], sites: dict[str, SiteTable]) -> TunnelTable:
    tunnel = _in_table("tunnel", lambda: TunnelTable(**fit_fields(table, TunnelTable)))
    match = _ENDPOINT.fullmatch(tunnel.endpoint)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError(
            f'[tunnel] endpoint must be a host and a port, such as "203.0.113.7:51820", got {quoted(tunnel.endpoint)}'
        )
    if tunnel.mtu not in _MTU:
        raise ValueError(f"[tunnel] mtu must be from {_MTU[0]} to {_MTU[-1]}, got {tunnel.mtu}")
    if len(sites) != 2:
        raise ValueError(f"[tunnel] joins two sites, got {', '.join(sorted(sites))}")
    for name, site in sites.items():
        if not _WIREGUARD_INTERFACE.fullmatch(site.interface):
            raise ValueError(
                f"[sites.{name}] interface must be a name that WireGuard can have, got {quoted(site.interface)}"
            )
    kinds = {name: _version(name, site.address) for name, site in sites.items()}
    if len({site.address for site in sites.values()}) == 1 or len(set(kinds.values())) == 2:
        raise ValueError(
            "[sites]: in a tunnel the sites have different addresses, both IPv4 or both IPv6, got "
            + " and ".join(site.address for site in sites.values())
        )
    return tunnel


def _version(name: str, address: str) -> int:
    try:
        return ipaddress.ip_address(address).version
    except ValueError:
        raise ValueError(
            f"[sites.{name}] address must be an IP address where there is a [tunnel], got {quoted(address)}"
        ) from None


def _options(table: dict[str, Any]) -> dict[str, Any]:
    """Those that the file gives; ``connect`` checks more than their types and signs."""
    found = fit_fields(table, ConnectOptions, "it")
    for name, value in found.items():
        if isinstance(value, int | float) and value < 0:
            raise ValueError(f"{name} must be in seconds, at least 0, got {value:g}")
        for link, choice in value.items() if isinstance(value, dict) else ():
            if not _LINK.fullmatch(link):
                raise ValueError(f"{name} names a link by its stages, '0-1', got {quoted(link)}")
            if isinstance(choice, dict):
                fit_fields(choice, _CompressionTable, f"{name}.{link}")
    return found


def _in_table(name: str, make: Callable[[], _T]) -> _T:
    try:
        return make()
    except (TopologyError, ValueError) as error:
        raise ValueError(f"[{name}] {error}") from error


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
