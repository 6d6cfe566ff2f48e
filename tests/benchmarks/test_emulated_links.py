"""Emulated links carry what goes between their ends, lose and queue packets as asked, and count every byte."""

from __future__ import annotations

import re
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_what_goes_between_two_hosts_goes_through_cards_of_that_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from two_hosts import two_hosts, why_not_two_hosts

    if reason := why_not_two_hosts():
        pytest.skip(reason)
    from pyroute2 import NetNS, netns

    def socket_in(namespace: str) -> socket.socket:
        def make() -> socket.socket:
            netns.setns(namespace, flags=0)  # of the thread
            return socket.socket()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(make).result()

    with two_hosts(4, 2, 25e6) as places:
        (edge, cloud), cards = dict.fromkeys(place.namespace for place in places), ["card0", "card1"]
        assert [(place.namespace, place.card) for place in places] == list(product((edge, cloud), cards))
        server, client = socket_in(cloud), socket_in(edge)
        server.bind(("10.77.1.2", 0))
        server.listen()
        client.connect(server.getsockname())
        with client, server, server.accept()[0] as there, NetNS(edge, flags=0) as host:
            client.sendall(b"x" * 100_000)
            assert len(there.recv(100_000, socket.MSG_WAITALL)) == 100_000
            sent = [host.link("get", ifname=card)[0].get_attr("IFLA_STATS64")["tx_bytes"] for card in cards]
            assert sent[0] < 100_000 < sent[1]
            queues = [queue for queue in host.get_qdiscs() if queue.get_attr("TCA_KIND") == "tbf"]
            settings = [queue.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS") for queue in queues]
            assert [setting["rate"] for setting in settings] == [25_000_000] * 2
    assert not {edge, cloud} & set(netns.listnetns())


def test_links_that_cannot_be_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyroute2")
    monkeypatch.syspath_prepend(BENCHMARKS)
    from transports import by_network
    from two_hosts import check_two_hosts

    for ranks, rate, sentence in [
        (1, 1e6, "expected ranks on two hosts, got 1, 1 of them on the edge"),
        (2, 5e9, "expected cards of 8 kbit/s to 34 Gbit/s, got 4e+10 bit/s"),
    ]:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            check_two_hosts(ranks, 1, rate)
    assert list(by_network(Namespace(device="cuda", transports=None))) == ["c10d", "nccl", "host"]
    with pytest.raises(ValueError, match="got copy_engine, which goes through the memory of one host"):
        by_network(Namespace(device="cuda", transports=["nccl", "copy_engine"]))


@pytest.mark.usefixtures("wide_area")
def test_packets_are_lost_and_queued_as_asked() -> None:
    from harness import in_ranks
    from wan_link import Settings, wide_area_link

    nbytes = 512 << 10
    with wide_area_link(Settings(125e6, 1e-3, 0.03), Settings(2.5e6, 1e-3, queue=30_000)) as link:
        assert in_ranks(_exchange, (nbytes,), 2, list(link.places)) == nbytes
        up, down = link.counters(0), link.counters(1)
    assert 0 < up.lost < 0.1 * up.packets
    assert up.overflowed == down.lost == 0
    assert down.overflowed > 0
    assert down.largest_backlog <= 30_000
    assert min(up.bytes, down.bytes) > nbytes


@pytest.mark.usefixtures("wide_area")
def test_every_byte_of_a_link_is_counted() -> None:
    """Datagrams, as nothing repeats them: a queue of ten takes no eleventh at once, a cut link none."""
    from wan_link import ADDRESSES, Settings, wide_area_link

    size, headers, framing = 1000, 28, 38
    queue = 10 * (size + headers + framing)
    with wide_area_link(Settings(1e-3, queue=queue), Settings(1e9)) as link:  # nothing leaves the queue
        sender, receiver = (
            _datagrams_in(place.namespace, address)
            for place, address in zip(link.places, ADDRESSES, strict=True)
        )
        with sender, receiver:
            for _ in range(25):
                sender.sendto(bytes(size), receiver.getsockname())
            _wait_until(lambda: link.counters(0).overflowed == 15)
            assert link.counters(0)[:4] == (10 * (size + headers), 10, 0, 15)
            assert queue - 1 <= link.counters(0).largest_backlog <= queue
            link.set(0, cut=1)
            for _ in range(3):
                sender.sendto(bytes(size), receiver.getsockname())
            _wait_until(lambda: link.counters(0).lost == 3)
            assert link.counters(0)[:4] == (10 * (size + headers), 10, 3, 15)
            receiver.sendto(bytes(size), sender.getsockname())
            assert len(sender.recv(2 * size)) == size
            assert link.counters(1)[:4] == (size + headers, 1, 0, 0)


@pytest.mark.usefixtures("wide_area")
def test_connections_open_from_one_end_alone_if_the_other_is_blocked() -> None:
    from wan_link import ADDRESSES, Settings, wide_area_link

    with wide_area_link(Settings(1e6)) as link, ExitStack() as stack:
        edge, cloud = (place.namespace for place in link.places)
        servers, callers = (
            {
                namespace: stack.enter_context(_socket_in(namespace, address, socket.SOCK_STREAM))
                for namespace, address in zip((edge, cloud), ADDRESSES, strict=True)
            }
            for _ in range(2)
        )
        for server in servers.values():
            server.listen()
        link.set(1, no_syn=1)
        callers[edge].connect(servers[cloud].getsockname())
        callers[cloud].settimeout(1.5)
        with pytest.raises(TimeoutError):
            callers[cloud].connect(servers[edge].getsockname())
        accepted = stack.enter_context(servers[cloud].accept()[0])
        accepted.sendall(b"answer")
        assert callers[edge].recv(6) == b"answer"


def _datagrams_in(namespace: str, address: str) -> socket.socket:
    return _socket_in(namespace, address, socket.SOCK_DGRAM)


def _socket_in(namespace: str, address: str, kind: socket.SocketKind) -> socket.socket:
    def make() -> socket.socket:
        from pyroute2 import netns

        netns.setns(namespace, flags=0)  # of the thread
        made = socket.socket(socket.AF_INET, kind)
        made.settimeout(20.0)
        made.bind((address, 0))
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def _wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _exchange(nbytes: int) -> int:
    """Send ``nbytes`` random bytes both ways; returns how many arrived as sent."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    sent = [
        torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
        for i in (0, 1)
    ]
    got = torch.zeros(nbytes, dtype=torch.uint8)
    works = [dist.irecv(got, 1 - rank), dist.isend(sent[rank], 1 - rank)]
    for work in works:
        assert work is not None
        work.wait()
    return int((got == sent[1 - rank]).sum())
