"""Steps over socket links: equal to the unsplit model, with any number of connections, and clear errors."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from torch import nn

import ldt
from ldt.runtime.comm.socket_choice import TcpLimits, TcpPath, choose
from ldt.runtime.comm.socket_dial import Check, accept, dial, listen
from ldt.runtime.comm.socket_probe import LinkProbe, best_rate, probe
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 4
WIDTH = 64


def _step(topology: Topology, connections: Any, options: dict[str, Any]) -> None:
    """Two steps and an eval, bit-equal to the unsplit model."""
    chunks = toy_chunks(topology, WIDTH)
    batch = toy_microbatches(6, WIDTH, batch=300)
    losses, reference = unsplit_step(chunks, batch, toy_loss)
    with ldt.connect(topology, connections=connections, ranks=range(topology.world_size), **options) as mesh:
        for channel in mesh.endpoints:
            crosses = 0 in (channel.source.stage, channel.target.stage)
            assert mesh.transport_of(channel) == ("sockets" if crosses else "c10d")
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss)
        for _ in range(2):
            for chunk in mine:
                chunk.zero_grad()
            result = pipeline.step(batch if mesh.is_edge else None)
        for index, chunk in zip(topology.chunks_of(mesh.stage), mine, strict=True):
            for parameter, expected in zip(chunk.parameters(), reference[index].parameters(), strict=True):
                if topology.served > 1:  # the reduction of replicas adds in another order
                    torch.testing.assert_close(parameter.grad, expected.grad)
                else:
                    assert torch.equal(parameter.grad, expected.grad)
        if mesh.is_edge:
            assert result.losses == losses
        evaluated = pipeline.eval(batch if mesh.is_edge else None)
        if mesh.is_edge:
            model = nn.Sequential(*chunks)
            with torch.no_grad():
                expected_outputs = [model(inputs) for inputs, _ in batch]
            assert all(map(torch.equal, evaluated.outputs, expected_outputs))


@pytest.mark.parametrize("connections", [1, 3, "auto"])
@pytest.mark.parametrize(
    ("topology", "options"),
    [
        (Topology([1, 1, 1]), {}),
        (Topology([1, 1], laps=2), {"lanes": "paired"}),
        (Topology([1, 2]), {}),
        (Topology([2, 2]), {"transfer": "scatter"}),
        (Topology([1, 1], dp=2), {}),
        (Topology([1, 1], dp=2, edge_dp=1), {}),
    ],
    ids=["three stages", "two laps, paired", "a broadcast", "scatter", "replicas", "a shared edge"],
)
def test_steps_equal_the_unsplit_model(
    pool: RankPool, topology: Topology, options: dict[str, Any], connections: Any
) -> None:
    pool.run(_step, topology, connections, options, ranks=range(topology.world_size), timeout=60)


def _fails(how: str) -> str:
    """The middle stage raises, or is gone, in the third forward; the text that this rank raises."""
    topology = Topology([1, 1])
    chunks = toy_chunks(topology, WIDTH)
    calls = 0

    def broken(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            if how == "exit":
                os._exit(1)
            raise ArithmeticError("no such number")

    mesh = ldt.connect(topology, connections=2, ranks=range(2))
    mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
    pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss)
    batch = toy_microbatches(8, WIDTH, batch=300)
    pipeline.step(batch if mesh.is_edge else None)
    if mesh.stage == 1:
        mine[0].register_forward_hook(broken)
    with pytest.raises((ldt.LdtError, ArithmeticError)) as error:
        pipeline.step(batch if mesh.is_edge else None)
    mesh.close()
    return f"{type(error.value).__name__}: {error.value}"


def test_an_error_of_another_rank_ends_the_step(pool: RankPool) -> None:
    edge, cloud = pool.run(_fails, "raise", ranks=range(2), timeout=60)
    assert "rank 1" in edge
    assert "no such number" in edge
    assert cloud == "ArithmeticError: no such number"


def _connects(counts: list[int]) -> str:
    rank = torch.distributed.get_rank()
    with pytest.raises(ldt.LdtError) as error:
        ldt.connect(Topology([1, 1]), connections=counts[rank], ranks=range(2))
    return str(error.value)


def test_numbers_that_differ_are_refused(pool: RankPool) -> None:
    for text in pool.run(_connects, [1, 2], ranks=range(2), timeout=60):
        assert "connections" in text


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (65, ValueError), (True, TypeError), ("2", TypeError)]
)
def test_values_that_are_no_number_of_connections_are_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="connections"):
        ldt.connect(Topology([1]), connections=value)


def test_auto_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ValueError, match="Linux"):
        ldt.connect(Topology([1]), connections="auto")


def _within(seconds: float = 30.0) -> Check:
    """Give up then."""
    deadline = time.monotonic() + seconds

    def check(problem: str) -> None:
        assert time.monotonic() < deadline, problem

    return check


def test_strangers_are_turned_away() -> None:
    server, token = listen(), "0" * 32
    address = server.getsockname()[:2]
    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        stack.callback(server.close)
        accepted = thread.submit(accept, server, token, [(0, number) for number in range(3)], _within())
        silent = stack.enter_context(closing(socket.create_connection(address)))
        gone = socket.create_connection(address)
        gone.close()
        for text in (b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n", b"1" * 32 + bytes(8)):
            stranger = stack.enter_context(closing(socket.create_connection(address)))
            stranger.sendall(text)
        offer = {"address": f"{address[0]}:{address[1]}", "token": token}
        ours = [stack.enter_context(closing(one)) for one in dial(0, {1: offer}, {1: range(3)}, _within())[1]]
        theirs = [stack.enter_context(closing(accepted.result()[0, index])) for index in range(3)]
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.sendall(bytes([index]))
            assert other.recv(1) == bytes([index])
        assert silent.recv(1) == b"", "it was closed"


def test_who_gives_up_may_call_again_and_others_stay_connected() -> None:
    server, token = listen(), "0" * 32
    address = server.getsockname()[:2]
    offer = {"address": f"{address[0]}:{address[1]}", "token": token}
    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        stack.callback(server.close)
        accepted = thread.submit(accept, server, token, [(0, number) for number in range(2)], _within())
        with closing(socket.create_connection(address)) as first:
            first.sendall(token.encode() + bytes(8))  # rank 0, number 0
        ours = [dial(0, {1: offer}, {1: range(number, number + 1)}, _within())[1][0] for number in (1, 0)]
        theirs = [accepted.result()[0, number] for number in (1, 0)]
        for one, other in zip(ours, theirs, strict=True):
            stack.enter_context(closing(one)).sendall(b"x")
            assert stack.enter_context(closing(other)).recv(1) == b"x"


def test_a_link_is_measured_from_both_ends() -> None:
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads, closing(listen()) as server:
        ours = [
            stack.enter_context(closing(socket.create_connection(server.getsockname()))) for _ in range(2)
        ]
        theirs = [stack.enter_context(closing(server.accept()[0])) for _ in range(2)]
        ends = [threads.submit(probe, {peer: found}, _within()) for peer, found in ((1, ours), (0, theirs))]
        for peer, end in zip((1, 0), ends, strict=True):
            found = end.result(timeout=30)[peer]
            assert 0 < found.round_trip < 0.05
            assert best_rate([found]) > 1e6
        for one, other in zip(ours, theirs, strict=True):  # nothing of it is left on the connections
            one.setblocking(True)
            other.setblocking(True)
            one.sendall(b"first")
            assert other.recv(5, socket.MSG_WAITALL) == b"first"


@pytest.mark.usefixtures("wide_area")
def test_segments_may_become_smaller_while_a_link_is_measured() -> None:
    """As on a path through a tunnel, of which the first large packets tell."""
    from pyroute2 import NetNS
    from wan_link import ADDRESSES, DEVICE, Settings, wide_area_link

    with wide_area_link(Settings(12.5e6, 0.1)) as link, ExitStack() as stack:
        edge, cloud = (place.namespace for place in link.places)
        server = stack.enter_context(_inside(cloud, lambda: socket.create_server((ADDRESSES[1], 0))))
        address = server.getsockname()
        ours = [
            stack.enter_context(_inside(edge, lambda: socket.create_connection(address))) for _ in range(2)
        ]
        theirs = [stack.enter_context(server.accept()[0]) for _ in range(2)]
        for one, other in zip(ours, theirs, strict=True):
            one.sendall(b"hello")
            assert other.recv(5) == b"hello"

        routes = stack.enter_context(NetNS(edge))
        device = routes.link_lookup(ifname=DEVICE)[0]
        with ThreadPoolExecutor(2) as threads:
            ends = [threads.submit(probe, {0: found}, _within()) for found in (ours, theirs)]
            time.sleep(0.05)  # nothing of what they send has arrived
            routes.route("replace", dst=f"{ADDRESSES[1]}/32", oif=device, metrics={"mtu": 1300})
        for end in ends:
            assert 0.5 < best_rate([end.result()[0]]) / 12.5e6 < 1.3


def _inside(namespace: str, make: Callable[[], socket.socket]) -> socket.socket:
    def enter_and_make() -> socket.socket:
        from pyroute2 import netns

        netns.setns(namespace, flags=0)  # of the thread
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter_and_make).result()


def test_pairs_that_share_a_link_do_not_count_it_twice() -> None:
    """Each has all of it for a while."""
    turns = [
        LinkProbe(0.04, tuple(rates), 0.0) for rates in ([90.0] * 4 + [10.0] * 4, [10.0] * 4 + [90.0] * 6)
    ]
    assert best_rate(turns) == 100.0
    assert best_rate([LinkProbe(0.04, (0.0, 30.0, 60.0, 90.0, 0.0), 0.0)]) == 60.0
    assert best_rate([LinkProbe(0.04, (), 0.0)]) == 0.0


STOCK = TcpLimits(2 << 20, allows_bbr=True)


@pytest.mark.parametrize(
    ("rate", "round_trip", "loss", "limits", "expected", "paced"),
    [
        (25e6, 0.04, 0.0, STOCK, 1, True),
        (125e6, 0.1, 0.0, STOCK, 6, True),
        (125e6, 0.04, 1e-3, STOCK, 2, True),
        (125e6, 0.04, 1e-3, TcpLimits(2 << 20, allows_bbr=False), 32, True),
        (12.5e6, 0.04, 1e-3, TcpLimits(2 << 20, allows_bbr=False), 9, True),
        (125e6, 0.04, 0.0, TcpLimits(32 << 20, allows_bbr=True), 1, True),
        (5e9, 1e-4, 0.0, STOCK, 1, False),
        (12.5e9, 0.1, 0.0, STOCK, 64, True),
    ],
    ids=["short", "long", "lossy", "no bbr", "no bbr, slower", "larger buffers", "no link", "the most"],
)
def test_connections_fill_the_product_of_rate_and_round_trip(
    rate: float, round_trip: float, loss: float, limits: TcpLimits, expected: int, paced: bool
) -> None:
    pairs = [LinkProbe(round_trip, (rate / 2,), loss), LinkProbe(2 * round_trip, (rate / 2,), 0.0)]
    path = TcpPath.of(pairs, [LinkProbe(round_trip, (1e5,), 0.0)] * 2, [limits, STOCK])
    if limits.window > STOCK.window:
        path = TcpPath.of(pairs, pairs, [limits, limits])
    chosen = choose(path, 0)
    assert (chosen.connections, chosen.bbr) == (expected, loss > 0 and limits.allows_bbr)
    assert chosen.pace == pytest.approx(1.15 * rate / expected if paced else 0)


def test_sysctls_that_would_help_are_named() -> None:
    limits = [TcpLimits(2 << 20, allows_bbr=False)]
    lossy = TcpPath.of([LinkProbe(0.04, (1e8,), 1e-3)], [LinkProbe(0.04, (1e8,), 0.0)], limits)
    assert "tcp_allowed_congestion_control" in "".join(lossy.advice())
    long = TcpPath.of([LinkProbe(0.2, (12.5e9,), 0.0)], [LinkProbe(0.2, (1e8,), 0.0)], limits)
    assert [line.split("=")[0] for line in long.advice()] == [
        "sysctl -w net.ipv4.tcp_rmem",
        "sysctl -w net.ipv4.tcp_wmem",
    ]
    clean, thin = LinkProbe(0.04, (1e8,), 0.0), LinkProbe(0.01, (1e8,), 0.0)
    assert not list(TcpPath.of([clean], [clean], limits).advice())
    restarts = [*limits, TcpLimits(2 << 20, allows_bbr=False, restarts=True)]
    (line,) = TcpPath.of([clean], [clean], restarts).advice()
    assert line.startswith("sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on both sites")
    assert not list(TcpPath.of([thin], [thin], restarts).advice())
    lost = LinkProbe(0.04, (1e8,), 1e-3)
    assert not list(TcpPath.of([lost], [lost], [TcpLimits(2 << 20, True, restarts=True)]).advice())


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e300])
def test_figures_that_no_end_can_have_seen_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="positive figures"):
        LinkProbe(0.1, (value,), 0.0)
