"""Whether hosts of different sites can connect: a firewall may let one of them open connections but not the other."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv4Address
from typing import Any, NamedTuple

import torch.distributed as dist

from ldt.errors import LdtError
from ldt.runtime.comm.socket_dial import address_of, listen
from ldt.runtime.common.peer_messages import read_or_raise
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.health.connections import host_of
from ldt.runtime.health.watchdog import Watchdog

__all__ = ["Hosts", "check_dials", "facts_of"]

_POLL_SECONDS = 0.05
_HERE = "here"


class Hosts(NamedTuple):
    """Where ranks are: the address at which each listens during connect, and a rank on the site of the store."""

    addresses: Mapping[int, str] = {}
    store_rank: int = 0

    @classmethod
    def of(cls, facts: Mapping[int, Mapping[str, str]], rank_info: RankInfo) -> Hosts:
        """From the ``facts_of`` each rank. Unless one site alone has the store, it is taken to be where rank 0 is."""
        near = [rank for rank, one in facts.items() if one.get("store") == _HERE]
        store_rank = near[0] if len({rank_info.site_of(rank) for rank in near}) == 1 else 0
        return cls({rank: one.get("address", "") for rank, one in facts.items()}, store_rank)

    def names(self, ranks: Sequence[int]) -> list[str]:
        """The host of each of ``ranks``; "" where that is not known."""
        return [self.addresses.get(rank, "").rpartition(":")[0] for rank in ranks]


class _Target(NamedTuple):
    """Another rank, where it listens."""

    rank: int
    host: IPv4Address
    port: int


@contextmanager
def facts_of(rank_info: RankInfo, store: Any) -> Iterator[dict[str, str]]:
    """What others need to know of this host, if there are other sites. Meanwhile it listens at the address in it."""
    with ExitStack() as opened:
        facts = {}
        if dist.is_initialized() and len(set(rank_info.topology.sites)) > 1:
            with suppress(OSError):  # gloo says what is wrong
                if _is_ipv4():
                    facts["address"] = address_of(opened.enter_context(listen()))
            host = host_of(store)
            facts["store"] = _HERE if host and _is_here(host) else ""
        yield facts


def check_dials(
    rank_info: RankInfo,
    addresses: Mapping[int, str],
    peers: Collection[int],
    watchdog: Watchdog,
    seconds: float,
) -> None:
    """Raise LdtError if this rank cannot connect to those ``peers`` of other sites to which gloo connects from here.

    Of two hosts gloo connects from the one with the numerically larger address. A connection to one rank on each
    host, within ``seconds``, is enough. Raises RemoteStageError if another rank failed.
    """
    own = rank_info.global_rank
    here = _target(own, addresses)
    if here is None:
        return
    by_host: dict[IPv4Address, list[_Target]] = {}
    for rank in sorted(peers):
        there = _target(rank, addresses)
        if there and rank_info.site_of(rank) != rank_info.site_of(own) and there.host < here.host:
            by_host.setdefault(there.host, []).append(there)
    targets = [found[own % len(found)] for found in by_host.values()]
    for target, problem in _dial(targets, watchdog, seconds).items():
        site = rank_info.site_of(target.rank)
        raise LdtError(
            f"connect: rank {own} of site {rank_info.site_of(own)} ({here.host}) cannot open a connection to rank "
            f"{target.rank} of site {site} ({target.host}): {problem}. Either the link between them is down; pass "
            "connect a longer outage if it may be. Or a firewall blocks this direction, in which gloo connects, from "
            f"the numerically larger address. Let the firewall of site {site} admit {here.host} to the ports of "
            "net.ipv4.ip_local_port_range, give that site the larger address, or join the sites by a tunnel "
            "(python -m ldt tunnel)"
        )


def _is_ipv4() -> bool:
    """Whether gloo takes the IPv4 address, which an interface has first, and a host's name may have."""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    return bool(named) or socket.getaddrinfo(socket.gethostname(), 0)[0][0] == socket.AF_INET


def _is_here(host: str) -> bool:
    """Whether a name or an address is one of this host, which then reaches it from that very address."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                if probe.getsockname()[0] == probe.getpeername()[0]:
                    return True
    return False


def _target(rank: int, addresses: Mapping[int, str]) -> _Target | None:
    """None for a rank that gave no address, or one that only its own host can reach."""

    def read(text: str) -> _Target | None:
        host, port = text.rsplit(":", 1)
        target = _Target(rank, IPv4Address(host), int(port))
        if not 0 < target.port < 65536:
            raise ValueError("expected a port")
        return None if target.host.is_loopback else target

    text = addresses.get(rank)
    return read_or_raise(text, read, f"connect: rank {rank}") if text else None


def _dial(targets: Collection[_Target], watchdog: Watchdog, seconds: float) -> dict[_Target, str]:
    """Connect to all at once. Returns those that cannot be reached, each with the reason."""
    problems = dict.fromkeys(targets, f"no answer for {seconds:.0f} s")
    deadline = time.monotonic() + seconds
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        for target in targets:
            connection = opened.enter_context(socket.socket())
            connection.setblocking(False)
            error = connection.connect_ex((str(target.host), target.port))
            if error == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, (target, connection))
            else:
                problems[target] = os.strerror(error)
        while selector.get_map() and time.monotonic() < deadline:
            watchdog.check()
            for key, _ in selector.select(_POLL_SECONDS):
                target, connection = key.data
                selector.unregister(connection)
                problems[target] = os.strerror(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    return {target: problem for target, problem in problems.items() if problem != os.strerror(0)}
