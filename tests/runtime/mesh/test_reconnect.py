"""After a failure nothing is left of the mesh, and ranks can connect again and continue with the same chunks."""

from __future__ import annotations

import gc
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_jobs import build, step_and_compare
from torch import nn

import ldt
from ldt.runtime.health.connections import Connections
from ldt.testing import RankPool, ToyChunk, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4


class BoomError(Exception):
    pass


class Failing(ToyChunk):
    def __init__(self) -> None:
        super().__init__(16)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and self.fails:
            self.fails = False
            raise BoomError("no more")
        return super().forward(x)


def what_stays_open() -> tuple[int, ...]:
    """The fewest of each in half a second: a request to the store may just have a thread that limits its time."""
    samples = []
    for _ in range(6):
        samples.append(what_is_open())
        time.sleep(0.1)
    return tuple(map(min, zip(*samples, strict=True)))


def what_is_open() -> tuple[int, int, int]:
    """The threads, sockets and other open files of this process."""
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]  # noqa: PTH115
    sockets = [file for file in files if file.startswith("socket:")]
    return len(list(Path("/proc/self/task").iterdir())), len(sockets), len(files) - len(sockets)


def again(tp: list[int], dp: int, transfer: Any, failing: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Three times: a step in which ``failing`` raises, then a step on the reconnected mesh."""
    topology = Topology(tp, dp=dp)
    torch.manual_seed(0)
    chunks: list[Any] = [Failing() for _ in range(topology.num_chunks)]
    mesh = ldt.connect(topology, transfer=transfer)
    counts = []
    for _ in range(3):
        if mesh.rank == failing:
            chunks[mesh.stage].fails = True
        with pytest.raises((BoomError, ldt.RemoteStageError)):  # noqa: PT012
            build(mesh, chunks).step(toy_microbatches(4) if mesh.is_edge else None)
            build(mesh, chunks).step(toy_microbatches(4) if mesh.is_edge else None)
        for chunk in chunks:
            chunk.fails = False
            chunk.zero_grad()
        mesh = mesh.reconnect()
        time.sleep(0.5)  # threads may still be ending
        gc.collect()  # objects that a traceback holds
        counts.append(what_stays_open())
    if dp == 1:
        step_and_compare(mesh, build(mesh, chunks), chunks, toy_microbatches(3))
    mesh.close()
    return counts[0], counts[-1]


@pytest.mark.parametrize(
    ("tp", "dp", "transfer", "failing"),
    [
        ([1, 2, 1], 1, "leader", 1),
        ([1, 2, 1], 1, "leader", 3),
        ([2, 2], 1, "scatter", 0),
        ([1, 1], 2, "leader", 3),
    ],
)
def test_ranks_connect_again_and_nothing_is_left(
    pool: RankPool, tp: list[int], dp: int, transfer: str, failing: int
) -> None:
    """Neither threads nor sockets nor files of the meshes that failed."""
    for first, last in pool.run(again, tp, dp, transfer, failing):
        assert all(after <= before for before, after in zip(first, last, strict=True)), (first, last)


def test_only_connections_opened_since_are_closed() -> None:
    one, other = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    before = socket.create_connection(listener.getsockname())
    connections = Connections()
    with connections.recording(None):
        opened = socket.create_connection(listener.getsockname())
        second = socket.create_server(("127.0.0.1", 0))
        closed = socket.create_connection(listener.getsockname())
    number = closed.fileno()
    closed.close()
    reused = socket.create_connection(listener.getsockname())
    assert reused.fileno() == number
    peers = [listener.accept()[0] for _ in range(4)]
    connections.shutdown()
    connections.shutdown()
    assert opened.recv(1) == b""
    assert peers[1].recv(1) == b""
    for peer, mine in ((peers[0], before), (peers[3], reused)):
        peer.sendall(b"x")
        assert mine.recv(1) == b"x"
    socket.create_connection(second.getsockname()).close()
    for file in (one, other, listener, before, opened, second, reused, *peers):
        file.close()


def test_connections_to_a_store_hosted_here_are_kept() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    connections = Connections()
    with connections.recording(dist.PrefixStore("job", store)):
        mine = store.clone()
        mine.set("here", "1")  # the peer socket, in this process, is open now
    assert len(connections) == 1
    connections.set_read_timeout(5.0)
    assert store.get("here") == b"1"
    connections.shutdown()
    with pytest.raises(dist.DistNetworkError):
        mine.get("here")
    assert store.get("here") == b"1"


def test_a_mesh_of_one_rank_reconnects() -> None:
    chunks: list[nn.Module] = [ToyChunk(16), ToyChunk(16)]
    mesh = ldt.connect(Topology([1]))
    other = mesh.reconnect()
    with pytest.raises(ldt.LdtError, match="closed"):
        build(mesh, chunks)
    result = build(other, chunks).step(toy_microbatches(2))
    assert result.loss is not None
    other.close()
