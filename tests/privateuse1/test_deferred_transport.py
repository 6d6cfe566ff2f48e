"""Transport host on devices without a copy engine: a thread of the host copies, and wait() waits on the host."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import npu
import pytest
import torch
import torch.distributed as dist
from npu_lanes import assert_all, forward_end, send, sized

import ldt
from ldt.runtime.mesh.reachability import Hosts
from ldt.testing import RankPool
from ldt.topology import Topology

WORLD_SIZE = 3


def _exchange(mesh: ldt.Mesh, device: torch.device, nbytes: int) -> None:
    end = forward_end(mesh)
    if end is None:
        return
    message = sized(device, nbytes, 3)
    if end.sends:
        send(end, message).wait()
    else:
        target = end.lane.empty(message.shape, message.dtype)
        end.receive([target], "data").wait()
        assert_all([(target == message).all()])


def _kinds(transport: Any, hosts: list[str], refuses: list[int]) -> set[str]:
    """The transports of rank 0, the edge. The ranks of ``refuses`` have no copy engine."""
    has_engine, names = dist.get_rank() not in refuses, Hosts.names
    Hosts.names = lambda *_: hosts  # type: ignore[method-assign]
    try:
        with (
            npu.late(5, 200, copy_engine=has_engine) as device,
            ldt.connect(Topology([1, 2]), "hccl", transport=transport) as mesh,
        ):
            _exchange(mesh, device, (40 << 20) + 4)
            return {mesh.transport_of(channel) for channel in mesh.endpoints}
    finally:
        Hosts.names = names  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("transport", "hosts", "refuses", "expected"),
    [
        ("host", "aaa", [0, 1, 2], "host"),
        ("host", "aaa", [1], "host"),
        ("host", "aaa", [2], "host"),
        ("auto", "abb", [0, 1, 2], "host"),
        ("auto", "abb", [0], "host"),
        ("auto", "aaa", [0, 1, 2], "c10d"),
        ("c10d", "abb", [0, 1, 2], "c10d"),
    ],
)
def test_lanes_between_hosts_need_no_copy_engine(
    pool: RankPool, transport: str, hosts: str, refuses: list[int], expected: str
) -> None:
    assert pool.run(_kinds, transport, list(hosts), refuses, timeout=60) == [{expected}] * 3


def _reused_at_once(lanes: Any) -> None:
    """Many messages sent ahead, whose memory is overwritten as soon as their works say that it may be."""
    with (
        npu.late(8, 300, copy_engine=False) as device,
        ldt.connect(Topology([1, 1, 1]), "hccl", transport="host", lanes=lanes) as mesh,
    ):
        end, checks = forward_end(mesh), []
        sizes = [4, 3 << 20, 64, (17 << 20) + 4, 8 << 20] * 3
        sent = []
        for number, nbytes in enumerate(sizes):
            message = sized(device, nbytes, number)
            if end is not None and end.sends:
                sent.append((send(end, message), message))
            elif end is not None:
                target = end.lane.empty(message.shape, message.dtype)
                end.receive([target], "data").wait()
                checks.append((target == message).all())
        for work, message in sent:
            work.wait()
            message.fill_(-1)
        if checks:
            assert_all(checks)


@pytest.mark.parametrize("lanes", ["dedicated", "paired"])
def test_memory_may_be_reused_after_wait(pool: RankPool, lanes: str) -> None:
    pool.run(_reused_at_once, lanes, timeout=60)


def _any_targets() -> None:
    """Targets that are not the lane's own, strided or used by work that is still queued."""
    with (
        npu.late(9, 500, copy_engine=False) as device,
        ldt.connect(Topology([1, 1, 1]), "hccl", transport="host") as mesh,
    ):
        end, checks = forward_end(mesh), []
        for number in range(20):
            message = torch.full((40, 30), float(number), device=device)
            if end is not None and end.sends:
                send(end, message)
            elif end is not None:
                whole = torch.full((30, 80), -1.0, device=device)
                npu.sleep(5)
                work = end.lane.recv([whole.t()[::2]], 0)
                work.wait()
                checks += [(whole[:, ::2] == number).all(), (whole[:, 1::2] == -1).all()]
        if checks:
            assert_all(checks)


def test_targets_may_be_strided_and_in_use(pool: RankPool) -> None:
    pool.run(_any_targets, timeout=60)


def _dropped_receives() -> None:
    """Targets that nobody waits for: later messages come all the same, and no host waits for the dropped ones."""
    with (
        npu.late(10, 200, copy_engine=False) as device,
        ldt.connect(Topology([1, 1, 1]), "hccl", transport="host") as mesh,
    ):
        end, took = forward_end(mesh), 0.0
        if end is not None and not end.sends:
            start = time.monotonic()
            for number in range(6):
                end.receive([end.lane.empty((1024 << number % 3,), torch.int32)], "dropped")
            took = time.monotonic() - start
        dist.barrier()
        assert took < 5
        if end is not None and end.sends:
            for number in range(6):
                send(end, sized(device, 4096 << number % 3, 1))
        _exchange(mesh, device, 1 << 20)


def test_dropped_targets_hold_up_nothing(pool: RankPool) -> None:
    pool.run(_dropped_receives, timeout=60)


def _ended_wait(how: str) -> str:
    """What ends a wait for a message that never comes."""
    with npu.late(4, 0, copy_engine=False):
        mesh = ldt.connect(
            Topology([1, 1, 1]), "hccl", transport="host", transfer_timeout=timedelta(seconds=2)
        )
        end, found = forward_end(mesh), ""
        if end is not None and not end.sends:
            work = end.receive([end.lane.empty((1024,), torch.float32)], "doomed")
            endings = {
                "abort": lambda: end.lane.abort("the test aborts it"),
                "Ctrl-C": lambda: os.kill(os.getpid(), signal.SIGINT),
                "timeout": lambda: None,
            }
            timer = threading.Timer(0.3, endings[how])
            timer.start()
            start = time.monotonic()
            try:
                work.wait()
            except (ldt.LdtError, ldt.LaneError, KeyboardInterrupt) as error:
                found = f"{type(error).__name__}: {error}"
            assert time.monotonic() - start < 10
            assert end.lane.stats()["wait_seconds"] > 0.2
            timer.join()
        dist.barrier()
        mesh.close()
        return found


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("abort", "LaneError: the test aborts it"),
        ("Ctrl-C", "KeyboardInterrupt: "),
        ("timeout", "receive doomed has been under way for 2 s, longer than the timeout of 2 s"),
    ],
)
def test_a_wait_ends(pool: RankPool, how: str, expected: str) -> None:
    assert expected in pool.run(_ended_wait, how, timeout=60)[1]
