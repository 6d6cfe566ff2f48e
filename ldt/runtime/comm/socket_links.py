"""Socket links: TCP connections between two ranks on different sites, shared by all lanes between the two.

The rank of the higher stage listens, so a firewall of the edge's site has to let nothing in.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress

from ldt._C import SocketLink, SocketLinks
from ldt.errors import LdtError
from ldt.runtime.comm.group_layout import group_specs, lane_name
from ldt.runtime.comm.ipc_links import AllGather, IpcLink, LaneId
from ldt.runtime.comm.lane_layout import LaneLayout
from ldt.runtime.health.watchdog import Watchdog

__all__ = ["MAX_CONNECTIONS", "SocketConnector", "listen", "own_address"]

MAX_CONNECTIONS = 64
_POLL_SECONDS = 0.05
_HELLO = struct.Struct("!32sII")  # the listener's token, the rank that connects, the number of the connection
_WELCOME = b"\1"
_HELLO_SECONDS = 5.0
_UNSENT_BYTES = 256 << 10  # in the kernel: what is further behind keeps its place in the plan's order
_SIOCGIFADDR = 0x8915


LaneLinks = dict[LaneId, SocketLinks | None]  # None on a rank that only joins the broadcast


class SocketConnector:
    """Connects this rank's socket links. ``layout`` and ``num_connections`` of each are the same on all ranks."""

    def __init__(
        self,
        layout: LaneLayout,
        num_connections: int,
        all_gather: AllGather,
        watchdog: Watchdog,
        deadline: float,
    ) -> None:
        self._layout = layout
        self._num_connections = num_connections
        self._all_gather = all_gather
        self._watchdog = watchdog
        self._deadline = deadline

    def connect(self, links: Mapping[LaneId, Sequence[IpcLink]]) -> tuple[LaneLinks, list[SocketLink]]:
        """This rank's ends of all lanes between sites, and its links. A collective call of all ranks.

        Raises LdtError if a rank cannot be reached before the deadline, RemoteStageError if another rank failed.
        """
        rank = self._layout.rank
        pairs = sorted(
            {self._pair(link) for found in links.values() for link in found if self._crosses(link)}
        )
        callers = [low for low, high in pairs if high == rank]
        listeners = [high for low, high in pairs if low == rank]
        with ExitStack() as stack:
            server = stack.enter_context(closing(listen())) if callers else None
            token = secrets.token_hex(16)
            offer = {} if server is None else {"address": _address_text(server), "token": token}
            offers = self._all_gather("sockets", offer)
            sockets = {} if server is None else self.accept(server, token, callers)
            for peer in listeners:
                sockets[peer] = self.dial(peer, offers[peer])
        made = {peer: _link(peer, found) for peer, found in sockets.items()}
        return self._by_lane(links, made), list(made.values())

    def _crosses(self, link: IpcLink) -> bool:
        sites = {self._layout.topology.sites[self._stage_of(rank)] for rank in link[1:3]}
        return not link.in_stage and len(sites) > 1

    def _pair(self, link: IpcLink) -> tuple[int, int]:
        """The rank that dials, which is on the lower stage, and the rank that listens."""
        first, second = sorted(link[1:3], key=self._stage_of)
        return first, second

    def _stage_of(self, rank: int) -> int:
        return self._layout.topology.node_of(rank).stage

    def _by_lane(
        self, links: Mapping[LaneId, Sequence[IpcLink]], made: Mapping[int, SocketLink]
    ) -> LaneLinks:
        layout = self._layout
        specs = group_specs(layout.topology, layout.policy, layout.transfers)
        members = {spec.name: spec.ranks for spec in specs}
        ends: LaneLinks = {}
        for number, (lane, found) in enumerate(links.items()):
            crossing = [link for link in found if self._crosses(link)]
            own = [link for link in crossing if layout.rank in link[1:3]]
            if crossing:
                ends[lane] = None
            if own:
                group = members[lane_name(*lane)]
                peers = {link.source + link.target - layout.rank for link in own}
                ends[lane] = SocketLinks(links={group.index(peer): made[peer] for peer in peers}, lane=number)
        return ends

    # -- connecting --------------------------------------------------------------------------------------------

    def accept(
        self, server: socket.socket, token: str, callers: Sequence[int]
    ) -> dict[int, list[socket.socket]]:
        """The connections of each of ``callers``, in their order. Those that do not know the token are dropped."""
        found: dict[tuple[int, int], socket.socket] = {}
        expected = {(rank, index) for rank in callers for index in range(self._num_connections)}
        while found.keys() != expected:
            missing = sorted({rank for rank, _ in expected - found.keys()})
            self._check(f"ranks {missing} did not connect to {_address_text(server)}")
            with suppress(OSError):  # nobody yet, or nobody who speaks to us
                caller = server.accept()[0]
                key = _read_hello(caller, token)
                if key in expected:
                    caller.sendall(_WELCOME)
                    found[key] = caller  # in place of one that the other end has given up
                else:
                    caller.close()
        return {rank: [found[rank, index] for index in range(self._num_connections)] for rank in callers}

    def dial(self, rank: int, offer: Mapping[str, str]) -> list[socket.socket]:
        """The connections to ``rank``, which listens at the address of its offer."""
        host, port = offer["address"].rsplit(":", 1)
        connections = []
        for index in range(self._num_connections):
            hello = _HELLO.pack(offer["token"].encode(), self._layout.rank, index)
            while (connection := _greet(host, int(port), hello)) is None:
                self._check(f"rank {rank} cannot be reached at {offer['address']}")
                time.sleep(_POLL_SECONDS)
            connections.append(connection)
        return connections

    def _check(self, problem: str) -> None:
        self._watchdog.check()
        if time.monotonic() > self._deadline:
            raise LdtError(
                f"connect: {problem} in time: check that the hosts reach each other there, and that "
                "GLOO_SOCKET_IFNAME names the interface between them, or pass a longer timeout"
            )


def listen() -> socket.socket:
    """A socket that listens on a free port and whose ``accept`` returns after a moment if nobody comes."""
    server = socket.create_server((own_address(), 0), backlog=MAX_CONNECTIONS)
    server.settimeout(_POLL_SECONDS)
    return server


def own_address() -> str:
    """The IPv4 address of GLOO_SOCKET_IFNAME, else that of the host's name, else the loopback's, as gloo chooses."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _address_text(server: socket.socket) -> str:
    host, port = server.getsockname()[:2]
    return f"{host}:{port}"


def _greet(host: str, port: int, hello: bytes) -> socket.socket | None:
    """A connection that was welcomed after ``hello``; None if there is none."""
    with suppress(OSError), ExitStack() as undo:
        connection = undo.enter_context(socket.create_connection((host, port), timeout=_HELLO_SECONDS))
        connection.sendall(hello)
        if connection.recv(1) == _WELCOME:
            undo.pop_all()
            return connection
    return None


def _read_hello(caller: socket.socket, token: str) -> tuple[int, int] | None:
    """The rank and the number of a connection that knows ``token``; None for any other."""
    caller.settimeout(_HELLO_SECONDS)
    try:
        with caller.makefile("rb") as stream:  # nothing follows a hello until it is answered
            name, rank, index = _HELLO.unpack(stream.read(_HELLO.size))
    except (OSError, struct.error):
        return None
    return (rank, index) if secrets.compare_digest(name, token.encode()) else None


def _link(peer: int, connections: Sequence[socket.socket]) -> SocketLink:
    for connection in connections:
        for level, option, value in _options():
            connection.setsockopt(level, option, value)
    return SocketLink(
        [connection.detach() for connection in connections], name=f"the connections to rank {peer}"
    )


def _options() -> Iterator[tuple[int, int, int]]:
    """No delays, little unsent data in the kernel, and probes that keep a firewall's entry alive."""
    yield socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
    for name, value in (
        ("TCP_NODELAY", 1),
        ("TCP_NOTSENT_LOWAT", _UNSENT_BYTES),
        ("TCP_KEEPIDLE", 20),
        ("TCP_KEEPINTVL", 10),
        ("TCP_KEEPCNT", 6),
    ):
        if hasattr(socket, name):
            yield socket.IPPROTO_TCP, getattr(socket, name), value
