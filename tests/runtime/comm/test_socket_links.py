"""Steps over socket links: equal to the unsplit model, with any number of connections, and clear errors."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import ldt
from ldt.runtime.comm.socket_links import SocketConnector, listen
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 4
WIDTH = 64


def _step(topology: Topology, connections: int, options: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("connections", [1, 3])
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
    pool: RankPool, topology: Topology, options: dict[str, Any], connections: int
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


def _connector(rank: int) -> SocketConnector:
    """One that is asked only to accept or to dial."""
    layout, watchdog = cast(Any, SimpleNamespace(rank=rank)), cast(Any, SimpleNamespace(check=lambda: None))
    return SocketConnector(layout, 3, lambda _, value: [value], watchdog, time.monotonic() + 60)


def test_strangers_are_turned_away() -> None:
    server, token = listen(), "0" * 32
    address = server.getsockname()[:2]
    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        stack.callback(server.close)
        accepted = thread.submit(_connector(1).accept, server, token, [0])
        silent = stack.enter_context(closing(socket.create_connection(address)))
        gone = socket.create_connection(address)
        gone.close()
        for text in (b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n", b"1" * 32 + bytes(8)):
            stranger = stack.enter_context(closing(socket.create_connection(address)))
            stranger.sendall(text)
        offer = {"address": f"{address[0]}:{address[1]}", "token": token}
        ours = [stack.enter_context(closing(one)) for one in _connector(0).dial(1, offer)]
        theirs = [stack.enter_context(closing(one)) for one in accepted.result()[0]]
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.sendall(bytes([index]))
            assert other.recv(1) == bytes([index])
        assert silent.recv(1) == b"", "it was closed"
