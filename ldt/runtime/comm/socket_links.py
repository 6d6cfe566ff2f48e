"""Socket links: TCP connections between two ranks on different sites, shared by all lanes between the two.

The rank of the higher stage listens, so a firewall of the edge's site has to let nothing in.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Literal, NamedTuple

from ldt._C import SocketLink, SocketLinks
from ldt.errors import LdtError
from ldt.runtime.comm.group_layout import group_specs, lane_name
from ldt.runtime.comm.ipc_links import AllGather, IpcLink, LaneId
from ldt.runtime.comm.lane_layout import LaneLayout
from ldt.runtime.comm.socket_choice import TcpLimits, TcpPath, choose
from ldt.runtime.comm.socket_dial import accept, address_of, dial, listen
from ldt.runtime.comm.socket_options import SocketSettings, set_options
from ldt.runtime.comm.socket_probe import NUM_PROBES, LinkProbe, probe
from ldt.runtime.health.watchdog import Watchdog
from ldt.site import Site
from ldt.topology import Topology
from ldt.untrusted import read_fields

__all__ = ["DEFAULT_CONNECTIONS", "Connections", "SocketConnector", "crosses", "socket_lanes"]

logger = logging.getLogger(__name__)

Connections = int | Literal["auto"]
DEFAULT_CONNECTIONS: Connections = "auto" if sys.platform == "linux" else 4  # of devices
Pair = tuple[int, int]  # the rank that dials, and the one that listens


class Door(NamedTuple):
    """How this rank's connections come about: who dials it, and the offers of those that it dials."""

    server: socket.socket | None
    token: str
    callers: Sequence[int]
    listeners: Mapping[int, Mapping[str, str]]


class SocketConnector:
    """Opens this rank's socket links. ``layout`` and ``num_connections`` of each are the same on all ranks.

    Connections outlast an outage of up to ``outlast`` seconds.
    """

    def __init__(
        self,
        layout: LaneLayout,
        num_connections: Connections,
        all_gather: AllGather,
        watchdog: Watchdog,
        deadline: float,
        outlast: float = 0.0,
    ) -> None:
        self._outlast = outlast
        self._layout = layout
        self._num_connections = num_connections
        self._all_gather = all_gather
        self._watchdog = watchdog
        self._deadline = deadline

    def connect(self, links: Iterable[IpcLink]) -> dict[int, SocketLink]:
        """This rank's socket links, by the rank at the other end, for all ``links``. A collective call of all ranks.

        Raises LdtError if a rank cannot be reached before the deadline, RemoteStageError if another rank failed.
        """
        rank = self._layout.rank
        pairs = sorted({self._pair(link) for link in links})
        callers = [low for low, high in pairs if high == rank]
        listeners = [high for low, high in pairs if low == rank]
        asked = self._num_connections
        with ExitStack() as stack:
            server = stack.enter_context(closing(listen())) if callers else None
            token = secrets.token_hex(16)
            offers = self._all_gather(
                "sockets", {} if server is None else {"address": address_of(server), "token": token}
            )
            door = Door(server, token, callers, {peer: offers[peer] for peer in listeners})
            first = asked if isinstance(asked, int) else NUM_PROBES
            opened = self._open(door, dict.fromkeys((*callers, *listeners), range(first)))
            settings = self._settings(opened, pairs)
            more = self._open(
                door, {peer: range(first, chosen.connections) for peer, chosen in settings.items()}
            )
        made = {}
        for peer, chosen in settings.items():
            connections = opened[peer] + more[peer]
            for surplus in connections[chosen.connections :]:
                surplus.close()
            made[peer] = _link(peer, connections[: chosen.connections], chosen, self._outlast)
        return made

    def _pair(self, link: IpcLink) -> Pair:
        """The rank that dials, which is on the lower stage, and the rank that listens."""
        low, high = sorted((link.source, link.target), key=self._stage_of)
        return low, high

    def _site_of(self, rank: int) -> Site:
        return _site_of(self._layout.topology, rank)

    def _stage_of(self, rank: int) -> int:
        return self._layout.topology.node_of(rank).stage

    # -- connecting --------------------------------------------------------------------------------------------

    def _settings(
        self, opened: Mapping[int, list[socket.socket]], pairs: Sequence[Pair]
    ) -> dict[int, SocketSettings]:
        """For the connections to each peer: as asked for, or from what all ranks measured."""
        if isinstance(self._num_connections, int):
            return dict.fromkeys(opened, SocketSettings(self._num_connections))
        self._all_gather("sockets/opened", {})
        seen = {peer: vars(found) for peer, found in probe(opened, self._check).items()}
        own = {"limits": vars(TcpLimits.of_this_host()), **{str(peer): one for peer, one in seen.items()}}
        reported = self._all_gather("sockets/seen", {name: json.dumps(value) for name, value in own.items()})
        settings = {}
        for peer in opened:
            sites = sorted((self._site_of(self._layout.rank), self._site_of(peer)), key=str)
            path = self._path(sites, pairs, reported)
            settings[peer] = choose(path, sites.index(self._site_of(self._layout.rank)))
            logger.info("to rank %d: %s: %s", peer, path, settings[peer])
            for line in path.advice():
                logger.warning("the link to rank %d would be faster after: %s", peer, line)
        return settings

    def _path(
        self, sites: Sequence[Site], pairs: Sequence[Pair], reported: Sequence[Mapping[str, str]]
    ) -> TcpPath:
        """Between two sites, from what each of their ranks reported."""
        ends: tuple[list[LinkProbe], list[LinkProbe]] = ([], [])
        limits = []
        for pair in pairs:
            if sorted(map(self._site_of, pair), key=str) == sites:
                for one, other in (pair, pair[::-1]):
                    found = read_fields(LinkProbe, reported[one][str(other)])
                    ends[sites.index(self._site_of(one))].append(found)
                    limits.append(read_fields(TcpLimits, reported[one]["limits"]))
        return TcpPath.of(*ends, limits)

    def _open(self, door: Door, numbers: Mapping[int, range]) -> dict[int, list[socket.socket]]:
        """The connections of those numbers to each peer, in order."""
        callers = {(peer, number) for peer in door.callers for number in numbers[peer]}
        found = accept(door.server, door.token, callers, self._check) if door.server else {}
        opened = {peer: [found[peer, number] for number in numbers[peer]] for peer in door.callers}
        opened |= dial(self._layout.rank, door.listeners, numbers, self._check)
        return opened

    def _check(self, problem: str) -> None:
        self._watchdog.check()
        if time.monotonic() > self._deadline:
            raise LdtError(
                f"connect: {problem} in time: check that the hosts reach each other there, and that "
                "GLOO_SOCKET_IFNAME names the interface between them, or pass a longer timeout"
            )


def crosses(link: IpcLink, topology: Topology) -> bool:
    """Whether the ends of ``link`` are on different sites."""
    return _site_of(topology, link.source) != _site_of(topology, link.target)


def socket_lanes(
    links: Mapping[LaneId, Sequence[IpcLink]], layout: LaneLayout, made: Mapping[int, SocketLink]
) -> dict[LaneId, SocketLinks | None]:
    """The ends of all lanes between sites, None on a rank that only joins the broadcast. ``made`` is by peer."""
    specs = group_specs(layout.topology, layout.policy, layout.transfers)
    members = {spec.name: spec.ranks for spec in specs}
    ends: dict[LaneId, SocketLinks | None] = {}
    for number, (lane, found) in enumerate(links.items()):
        crossing = [link for link in found if crosses(link, layout.topology)]
        own = [link for link in crossing if layout.rank in link[1:3]]
        if crossing:
            ends[lane] = None
        if own:
            group = members[lane_name(*lane)]
            peers = {link.source + link.target - layout.rank for link in own}
            ends[lane] = SocketLinks(links={group.index(peer): made[peer] for peer in peers}, lane=number)
    return ends


def _site_of(topology: Topology, rank: int) -> Site:
    return topology.sites[topology.node_of(rank).stage]


def _link(
    peer: int, connections: Sequence[socket.socket], settings: SocketSettings, outlast: float
) -> SocketLink:
    set_options(connections, settings, outlast)
    return SocketLink(
        [connection.detach() for connection in connections], name=f"the connections to rank {peer}"
    )
