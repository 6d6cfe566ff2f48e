"""Two hosts on one: network namespaces, and between them a network card of a given rate for each pair of ranks.

The cards are real to all that opens sockets: TCP of the kernel's, each with its own queue (a token bucket), for gloo as
for NCCL. Ranks of one host talk past them, over the loopback or NVLink. The first ``edge`` ranks are on the first host,
all others on the second one, and rank i of either has card i, or the last one. There is no latency but that of the
kernel. Needs Linux, root and pyroute2.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Place", "two_hosts", "why_not_two_hosts"]

BURST_BYTES = 1 << 18  # may go at once, or what a card does in a millisecond: TCP hands over 64 KiB at a time
QUEUE_SECONDS = 50e-3


@dataclass(frozen=True)
class Place:
    """A rank's host and the card that it uses there."""

    namespace: str
    card: str

    def enter(self) -> None:
        """Move this process there, before it opens a socket or starts a thread; for NCCL it is a host of its own."""
        from pyroute2 import netns

        netns.setns(self.namespace)
        os.environ.update(
            GLOO_SOCKET_IFNAME=self.card,
            NCCL_SOCKET_IFNAME=f"={self.card}",
            NCCL_HOSTID=self.namespace,
            NCCL_IB_DISABLE="1",
        )


def why_not_two_hosts() -> str:
    """What is missing here, in a sentence; "" if nothing is known to be."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if importlib.util.find_spec("pyroute2") is None:
        return "pyroute2 is not installed: pip install pyroute2"
    return ""


@contextmanager
def two_hosts(ranks: int, edge: int, rate: float) -> Iterator[list[Place]]:
    """The place of each rank. ``rate``: of each card and direction, in bytes per second."""
    from pyroute2 import NetNS, netns

    sizes = (edge, ranks - edge)
    cards = min(sizes)
    names = [f"ldt-{os.getpid()}-{host}" for host in ("edge", "cloud")]
    with ExitStack() as undo:
        for name in names:
            if name in netns.listnetns():  # of a process that had this number and was killed
                netns.remove(name)
            netns.create(name)
            undo.callback(netns.remove, name)
        hosts = [undo.enter_context(NetNS(name)) for name in names]
        for host in hosts:
            _up(host, "lo")
        for card in range(cards):
            _connect(hosts, names, card, rate)
        yield [
            Place(name, f"card{min(index, cards - 1)}")
            for name, size in zip(names, sizes, strict=True)
            for index in range(size)
        ]


def _connect(hosts: list[Any], names: list[str], card: int, rate: float) -> None:
    """A cable between the two cards of that number, in a subnet of its own."""
    name = f"card{card}"
    hosts[0].link("add", ifname=name, kind="veth", peer={"ifname": name, "net_ns_fd": names[1]})
    for number, host in enumerate(hosts, start=1):
        index = _up(host, name)
        host.addr("add", index=index, address=f"10.77.{card}.{number}", prefixlen=24)
        host.tc(
            "add",
            "tbf",
            index,
            rate=int(rate),
            burst=max(BURST_BYTES, int(rate * 1e-3)),
            latency=int(QUEUE_SECONDS * 1e6),
        )


def _up(host: Any, name: str) -> int:
    index = int(host.link_lookup(ifname=name)[0])
    host.link("set", index=index, state="up")
    return index
