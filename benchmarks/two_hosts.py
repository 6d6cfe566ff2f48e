"""Two hosts on one machine: network namespaces, joined by a network card of a given rate for each pair of ranks.

The cards are real to all that opens sockets: the kernel's TCP, each with its own queue (a token bucket), for gloo as
well as NCCL. Ranks of one host communicate without them, over the loopback or NVLink. The first ``edge`` ranks are on
the first host, all others on the second; rank i of either host has card i, or the last one. The only latency is the
kernel's. Memory is still shared, so transports that use memory, such as the copy engine, bypass the cards. Needs
Linux, root and pyroute2.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Place", "check_two_hosts", "namespaces", "remove_those_left", "two_hosts", "why_not_two_hosts"]

BURST_BYTES = 1 << 18  # at least; or what a card sends in a millisecond: TCP passes on 64 KiB at a time
QUEUE_SECONDS = 50e-3
LEAST_RATE, MOST_RATE = 1e3, 2**32 - 1.0  # bytes per second: a 32-bit field of the kernel's token bucket


@dataclass(frozen=True)
class Place:
    """A rank's host and its card there."""

    namespace: str
    card: str

    def enter(self) -> None:
        """Move this process to its host before it opens a socket or starts a thread; to NCCL it is a separate host."""
        from pyroute2 import netns

        netns.setns(self.namespace, flags=0)  # a missing one would be created
        for name in ("all", self.card):
            # Traffic to a rank with another card leaves by that card, with this rank's address.
            with suppress(OSError):
                Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").write_text("0")
        os.environ.update(
            GLOO_SOCKET_IFNAME=self.card,
            NCCL_SOCKET_IFNAME=f"={self.card}",
            NCCL_HOSTID=self.namespace,
            NCCL_IB_DISABLE="1",
        )


def check_two_hosts(ranks: int, edge: int, rate: float) -> None:
    """Check the setup. Raises ValueError if such hosts cannot exist here."""
    try:
        with two_hosts(ranks, edge, rate):
            pass
    except ImportError:
        raise ValueError("two hosts need pyroute2, which is not installed: pip install pyroute2") from None
    except (OSError, _kernel_error()) as error:
        raise ValueError(
            f"two hosts need Linux, root, and a kernel with network namespaces, veth and tbf, got {error!r}"
        ) from error


def why_not_two_hosts() -> str:
    """Return what is missing here, in a sentence; "" if nothing is."""
    try:
        check_two_hosts(2, 1, LEAST_RATE)
    except ValueError as error:
        return str(error)
    return ""


@contextmanager
def two_hosts(ranks: int, edge: int, rate: float) -> Iterator[list[Place]]:
    """Yield the host and card of each rank. ``rate`` is that of each card and direction, in bytes per second.

    Only one at a time in a process. Raises ValueError if the kernel cannot have that rate, or a host has no rank.
    """
    from pyroute2 import NetNS

    sizes = (edge, ranks - edge)
    cards = min(sizes)
    if cards < 1:
        raise ValueError(f"expected ranks on two hosts, got {ranks}, {edge} of them on the edge")
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise ValueError(f"expected cards of 8 kbit/s to 34 Gbit/s, got {rate * 8:g} bit/s")
    with ExitStack() as undo:
        names = undo.enter_context(namespaces())
        hosts = [undo.enter_context(NetNS(name)) for name in names]
        for card in range(cards):
            _connect(hosts, names, card, rate)
        yield [
            Place(name, f"card{min(index, cards - 1)}")
            for name, size in zip(names, sizes, strict=True)
            for index in range(size)
        ]


@contextmanager
def namespaces() -> Iterator[list[str]]:
    """Yield the names of two network namespaces, the edge's and the cloud's, each with its loopback up."""
    from pyroute2 import NetNS, netns

    remove_those_left()
    names = [f"ldt-{os.getpid()}-{host}" for host in ("edge", "cloud")]
    with ExitStack() as undo:
        for name in names:
            undo.callback(_remove, name)  # first, since the name exists before the namespace does
            netns.create(name)
            with NetNS(name) as host:
                _up(host, "lo")
        yield names


def _connect(hosts: list[Any], names: list[str], card: int, rate: float) -> None:
    """Create a cable between the two cards of that number, in its own subnet."""
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


def remove_those_left() -> None:
    """Remove hosts of killed processes, one of which may have had this process's number."""
    from pyroute2 import netns

    for name in netns.listnetns():
        found = re.fullmatch("ldt-([0-9]+)-(edge|cloud)", name)
        if found and (int(found[1]) == os.getpid() or not Path(f"/proc/{found[1]}").exists()):
            _remove(name)


def _remove(name: str) -> None:
    from pyroute2 import netns

    with suppress(OSError):
        netns.remove(name)


def _kernel_error() -> type[Exception]:
    """Return what pyroute2 raises for an error from the kernel."""
    from pyroute2 import NetlinkError

    error: type[Exception] = NetlinkError
    return error
