"""What gloo groups that are made at once hear of other ranks may make no sense."""

from __future__ import annotations

import socket
import threading
from queue import SimpleQueue

import pytest

import ldt
from ldt.runtime.comm.group_exchange import GroupExchange, GroupRequest
from ldt.runtime.comm.group_set import GroupSet
from ldt.runtime.health.connections import Connections


def exchange() -> GroupExchange:
    return GroupExchange(GroupRequest("name", "mesh/name", [3, 5], "gloo"), SimpleQueue())


def test_who_announces_nonsense_is_named() -> None:
    with pytest.raises(ldt.LdtError, match="connect: rank 5 sent malformed data"):
        exchange().receive([{"first": "00"}, {"second": "no hex"}])


def test_an_address_that_nobody_announces_is_named() -> None:
    one = exchange()
    one.receive([{"first": "00ff"}, {}])
    assert one.get("first") == b"\x00\xff"
    one.receive([{}, {}])
    with pytest.raises(ldt.LdtError, match="group mesh/name did not announce 'second'"):
        one.get("second")


def test_nobody_waits_in_an_exchange_that_has_ended() -> None:
    one = exchange()
    one.end()
    errors: list[str] = []

    def wait_twice() -> None:
        for key in ("first", "second"):
            try:
                one.get(key)
            except ldt.LdtError as error:
                errors.append(str(error))

    thread = threading.Thread(target=wait_twice, daemon=True)
    thread.start()
    thread.join(10.0)
    assert len(errors) == 2


def test_a_lost_connection_of_several_groups_counts_once() -> None:
    groups, connections = GroupSet(), Connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with connections.recording(None):
            opened = socket.create_connection(server.getsockname())
        groups._connections = {"first": connections, "second": connections}
        assert groups.lost_connections() == []
        opened.close()
        assert len(groups.lost_connections()) == 1
