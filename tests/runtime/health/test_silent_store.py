"""A link to the store that goes down, or a host of it that hangs: requests and connecting end in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from silent_store import Link
from torch.distributed import PrefixStore, TCPStore

import ldt
from ldt.runtime.health import store_connection
from ldt.runtime.health.connections import _sockets
from ldt.runtime.health.store_connection import StoreConnection, check_host
from ldt.runtime.mesh.rendezvous import ask, check_in
from ldt.testing import in_time

MINUTE = timedelta(minutes=1)


@pytest.fixture
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with Link(server.port, admits=getattr(request, "param", "down") == "hangs") as made:
        yield made


either = pytest.mark.parametrize("link", ["down", "hangs"], indirect=True)


@pytest.fixture
def store(link: Link) -> PrefixStore:
    """A user's store, with its own timeout."""
    return PrefixStore("some", TCPStore("127.0.0.1", link.port, None, False, MINUTE))


@pytest.mark.parametrize(
    "request_of",
    [
        lambda store: store.check(["key"]),
        lambda store: store.get("key"),
        lambda store: store.multi_get(["key"]),
        lambda store: store.compare_set("key", "", "other"),
    ],
    ids=["check", "get", "multi_get", "compare_set"],
)
def test_a_request_ends_in_time(link: Link, store: PrefixStore, request_of: Callable[[Any], Any]) -> None:
    connection = StoreConnection(store, 1.0, 0.0)
    connection.set("key", "value")
    request_of(connection)
    link.cut()
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        request_of(connection)
    assert time.monotonic() - start > 0.9
    assert in_time(time.monotonic() - start, 1.5)


def test_a_request_outlasts_a_shorter_outage(link: Link, store: PrefixStore) -> None:
    connection = StoreConnection(store, 5.0, 0.0)
    connection.set("key", "value")
    link.cut()
    threading.Timer(1.0, link.mend).start()
    start = time.monotonic()
    assert connection.multi_get(["key"]) == [b"value"]
    assert time.monotonic() - start > 0.9


@either
def test_connecting_ends_in_time_and_leaves_nothing(link: Link, store: PrefixStore) -> None:
    link.cut()
    before, start = set(_sockets()), time.monotonic()
    with pytest.raises((TimeoutError, RuntimeError)):
        StoreConnection(store, 1.0, 0.0)
    assert in_time(time.monotonic() - start, 2.0)
    assert set(_sockets()) == before
    assert "ldt-store" not in [thread.name for thread in threading.enumerate()]
    assert store.timeout == MINUTE


@either
def test_renewing_ends_in_time(link: Link, store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_connection, "_RENEW_SECONDS", 1.0)
    connection = StoreConnection(store, 5.0, 0.0)
    link.cut()
    connection.shutdown()
    start = time.monotonic()
    assert not connection.renew()
    assert in_time(time.monotonic() - start, 2.5)


@either
def test_ranks_that_check_in_name_the_link(
    link: Link, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_connection, "_RENEW_SECONDS", 1.0)
    connection = StoreConnection(store, 1.0, 0.0)
    threading.Timer(0.5, link.cut).start()
    start = time.monotonic()
    with pytest.raises(
        ldt.LdtError, match=r"does not answer: [^\n]*, or the link to it is down: [^\n]*longer outage"
    ):
        ask(connection, partial(check_in, key="mesh", rank=0, ranks=[0, 1], settings={}, seconds=60.0))
    assert in_time(time.monotonic() - start, 4.0)


def test_a_host_without_the_store_is_not_waited_for() -> None:
    server = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)]
    client = TCPStore("127.0.0.1", server[0].port, None, False)
    check_host(client)
    server.clear()
    with pytest.raises(ConnectionRefusedError):
        check_host(client)
