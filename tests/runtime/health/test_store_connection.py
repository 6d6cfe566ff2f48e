"""The watchdog's connection to the store is made again if it breaks, and the job goes on."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing, suppress
from functools import partial

import pytest
from pipeline_jobs import build, step_and_compare
from torch.distributed import PrefixStore, TCPStore

import ldt
from ldt.runtime.health.store_connection import StoreConnection
from ldt.runtime.mesh.rendezvous import ask, check_in, mesh_key
from ldt.testing import RankPool, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3


def broken_connection(when: str) -> list[str]:
    """Break rank 1's connection to the store; "failing": it then fails. Returns this rank's error."""
    topology = Topology([1, 1, 1])
    chunks = toy_chunks(topology)
    with ldt.connect(topology) as mesh:
        pipeline = build(mesh, chunks)
        step_and_compare(mesh, pipeline, chunks, toy_microbatches(2))
        if mesh.rank == 1:
            mesh.watchdog.store.shutdown()
        if when == "failing":
            with pytest.raises((ldt.LdtError, ValueError)) as caught:
                fail(mesh)
            return [type(caught.value).__name__, str(caught.value)]
        time.sleep(2.5)  # a rank that sends no heartbeat for so long would be lost
        step_and_compare(mesh, pipeline, chunks, toy_microbatches(3))
    return []


def fail(mesh: ldt.Mesh) -> None:
    with mesh.collective("a call"):
        if mesh.rank == 1:
            raise ValueError("something else")
        mesh.control.all_gather(None)


def test_a_job_goes_on_with_a_new_connection(pool: RankPool) -> None:
    assert pool.run(broken_connection, "running") == [[]] * WORLD_SIZE


def test_a_failure_is_published_over_a_new_connection(pool: RankPool) -> None:
    answers = pool.run(broken_connection, "failing")
    assert answers[1] == ["ValueError", "something else"]
    for kind, text in (answers[0], answers[2]):
        assert kind == "RemoteStageError"
        assert "ValueError: something else" in text


def test_a_store_that_is_gone_is_not_waited_for() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False)
    connection = StoreConnection(PrefixStore("some", client), 5.0, 0.0)
    connection.set("key", "value")
    connection.shutdown()
    assert connection.renew()
    assert connection.get("key") == b"value"
    del server
    start = time.monotonic()
    assert not connection.renew()
    assert time.monotonic() - start < 2.0


def test_a_store_that_ends_while_ranks_check_in_is_named() -> None:
    server = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)]
    client = TCPStore("127.0.0.1", server[0].port, None, False)
    connection = StoreConnection(client, 5.0, 0.0)
    threading.Timer(0.3, server.clear).start()
    with pytest.raises(ldt.LdtError, match="connect: the store of the process group does not answer"):
        ask(connection, partial(check_in, key="mesh", rank=0, ranks=[0, 1], settings={}, seconds=20.0))


def test_ranks_check_in_over_a_new_connection() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    connection = StoreConnection(TCPStore("127.0.0.1", server.port, None, False), 5.0, 0.0)
    connection.shutdown()
    check = partial(check_in, key="mesh", rank=0, ranks=[0], settings={"a": "b"}, seconds=20.0)
    assert ask(connection, check)[0]["a"] == "b"


def test_a_store_whose_port_another_program_has_is_named() -> None:
    """It takes connections but does not speak as a store does."""
    server = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)]
    port = server[0].port
    connection = StoreConnection(TCPStore("127.0.0.1", port, None, False), 2.0, 0.0)
    server.clear()
    check = partial(check_in, key="mesh", rank=0, ranks=[0], settings={}, seconds=5.0)
    with closing(socket.create_server(("127.0.0.1", port))) as other:
        threading.Thread(target=hang_up, args=(other,), daemon=True).start()
        with pytest.raises(ldt.LdtError, match="connect: the store of the process group does not answer"):
            ask(connection, check)


def hang_up(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            server.accept()[0].close()


def test_a_store_that_is_gone_before_ranks_check_in_is_named() -> None:
    server = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)]
    client = TCPStore("127.0.0.1", server[0].port, None, False)
    server.clear()
    with pytest.raises(ldt.LdtError, match="connect: the store of the process group does not answer"):
        mesh_key(client, 0, [0, 1])


class BusyStore:
    """A store in whose process another thread connects to ``server`` just when this one does to the store."""

    def __init__(self, store: TCPStore, server: socket.socket) -> None:
        self.underlying_store = store
        self.server = server
        self.others: list[socket.socket] = []

    def clone(self) -> TCPStore:
        self.others.append(socket.create_connection(self.server.getsockname()))
        return self.underlying_store.clone()


def test_connections_of_other_threads_are_left_alone() -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, None, False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        busy = BusyStore(client, server)
        connection = StoreConnection(busy, 5.0, 20.0)
        assert connection.renew()
        connection.shutdown()
        for other in busy.others:
            assert not any(other.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
            server.accept()[0].sendall(b"x")
            assert other.recv(1) == b"x"
            other.close()
