"""A rank fails while others are in collectives of their stage; a failed mesh destroys its groups."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from acting_jobs import BoomError, caught_in_a_step, chunks_doing
from torch.distributed import distributed_c10d as c10d

import ldt
from ldt.runtime.comm import group_set as module
from ldt.runtime.health.connections import Connections
from ldt.testing import RankPool, in_time, paced
from ldt.topology import Topology

LIMIT = paced(1.5)


def boom() -> None:
    raise BoomError("no more")


def fail_soon(mesh: ldt.Mesh, seconds: float) -> None:
    """Count ``seconds`` from the beginning of the step, not of the setup."""
    threading.Timer(seconds, mesh.detector.publish, [BoomError("the edge")]).start()


def stuck(failing: int) -> tuple[int | None, str, float]:
    """Rank ``failing`` fails while rank 2 is in a collective of its stage that rank 1 has not joined."""
    topology = Topology([1, 2, 1])
    with ldt.connect(topology) as mesh:

        def act() -> None:
            if mesh.rank == failing == 1:
                boom()
            if mesh.rank == 1:
                time.sleep(paced(6.0).total_seconds())
            dist.all_reduce(torch.ones(1), group=mesh.tp_mesh.get_group())

        if failing == 3 and mesh.rank == 0:
            chunks = chunks_doing(topology, 0, partial(fail_soon, mesh, 0.2))
        else:
            chunks = chunks_doing(topology, 1, act)
        try:
            return caught_in_a_step(mesh, chunks)
        except BoomError:
            return mesh.rank, "", 0.0


@pytest.mark.parametrize("failing", [1, 3])
def test_a_rank_in_a_collective_of_its_stage_is_unblocked(pool: RankPool, failing: int) -> None:
    """Test ranks that wait for the failed rank, and ranks that wait for one that does not know of the failure yet."""
    culprit = {1: 1, 3: 0}[failing]
    for rank, (named, text, seconds) in enumerate(pool.run(stuck, failing)):
        if rank == 2:
            assert named == culprit, text
            assert in_time(seconds, 2.0)
            assert "BoomError" in text


def stopped_in_its_layers() -> tuple[int | None, str]:
    """Rank 2 waits in a collective of its stage for the stopped rank 1. Rank 1 is reported dead; rank 2 is not hung."""
    topology = Topology([1, 2])
    with ldt.connect(topology, ranks=range(3), stall_timeout=LIMIT) as mesh:
        pid = mesh.control.all_gather(os.getpid())[1]

        def act() -> None:
            if mesh.rank == 1:
                os.kill(pid, signal.SIGSTOP)
            dist.all_reduce(torch.ones(1), group=mesh.tp_mesh.get_group())

        named, text, _ = caught_in_a_step(mesh, chunks_doing(topology, 1, act))
    if mesh.rank == 0:
        os.kill(pid, signal.SIGCONT)
    return named, text


def test_a_rank_that_waits_in_its_layers_is_not_reported_hung(pool: RankPool) -> None:
    for rank, (named, text) in enumerate(pool.run(stopped_in_its_layers, ranks=range(3))):
        assert rank == 1 or named == 1, text
        assert "rank 1 (stage 1, replica 0) failed first" in text
        assert "no heartbeat" in text


def late_in_connect() -> tuple[str, float]:
    """A rank fails before it creates a group that the others already wait for."""
    make = module.make_group

    def refuse(name: str, *arguments: Any) -> Any:
        if name.endswith("control/leaders"):
            time.sleep(0.5)
            raise BoomError("no more sockets")
        return make(name, *arguments)

    if dist.get_rank() == 0:
        module.make_group = refuse
    start = time.monotonic()
    try:
        with pytest.raises((BoomError, ldt.LdtError)) as caught:
            ldt.connect(Topology([1, 1, 1]), ranks=range(3), heartbeat_timeout=LIMIT)
    finally:
        module.make_group = make
    return str(caught.value), time.monotonic() - start


def test_a_failure_while_groups_are_created(pool: RankPool) -> None:
    """The others wait in the store for the failed rank: that wait ends, too."""
    for rank, (text, seconds) in enumerate(pool.run(late_in_connect, ranks=range(3))):
        assert in_time(seconds, 4.0)
        assert rank == 0 or "rank 0 (stage 0, replica 0) failed first in connect" in text


ROUNDS = 8


def busy() -> list[float]:
    """Rank 0 fails while ranks 1 and 2 run one collective after another. Returns the seconds until this rank raised."""
    return [busy_for_a_while(0.1 + 0.03 * index) for index in range(ROUNDS)]


def busy_for_a_while(failing_after: float) -> float:
    topology = Topology([1, 2, 1])
    with ldt.connect(topology) as mesh:
        entered: list[float] = []

        def act() -> None:
            entered.append(time.monotonic())
            group = mesh.tp_mesh.get_group()
            going = torch.ones(1)
            end = time.monotonic() + 0.8
            while going:
                for _ in range(50):
                    dist.all_reduce(torch.ones(8), group=group)
                going.fill_(time.monotonic() < end)
                dist.all_reduce(going, dist.ReduceOp.MIN, group=group)

        doing = {0: (0, partial(fail_soon, mesh, failing_after))}
        _, text, seconds = caught_in_a_step(mesh, chunks_doing(topology, *doing.get(mesh.rank, (1, act))))
        assert "BoomError" in text
        assert len(entered) == (mesh.stage == 1), "the collectives had not begun"
    return seconds


def test_ranks_that_are_busy_with_collectives_all_leave(pool: RankPool) -> None:
    """gloo forgets operations in flight if a rank shuts down connections that it waits on itself."""
    for rank, seconds in enumerate(pool.run(busy)):
        assert in_time(max(seconds), 4.0), (rank, seconds)


def forgotten(group_timeout: float) -> tuple[float, list[str]]:
    """Rank 0 waits for rank 1 in a group whose connections were not recorded, as on systems without procfs."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    usual, module._DESTROY_SECONDS = module._DESTROY_SECONDS, 0.5
    module.logger.addHandler(handler)
    known = len(c10d._world.pg_map)
    groups = module.GroupSet()
    groups.use_store(c10d._get_default_store())
    for name in ("first", "waiting", "last"):
        group = groups.make(name, f"forgotten/{name}", [0, 1], "gloo", timedelta(seconds=20))
        group.set_timeout(timedelta(seconds=group_timeout))
        del group
    store = c10d._get_default_store()
    store.set(f"forgotten/{dist.get_rank()}", "made")
    store.wait(["forgotten/0", "forgotten/1"])  # gloo may still connect at the other end
    try:
        if dist.get_rank() == 1:
            time.sleep(group_timeout + 0.5)
        else:
            dist.all_reduce(torch.ones(1), group=groups["waiting"], async_op=True)
            groups._connections["waiting"] = Connections()
        groups.break_all()
        start = time.monotonic()
        groups.destroy()
        seconds = time.monotonic() - start
        assert len(c10d._world.pg_map) == known
        left = [thread for thread in threading.enumerate() if thread.name == "group waiting"]
        assert len(left) == 1 - dist.get_rank()
        for thread in left:
            thread.join(group_timeout + 5.0)
            assert not thread.is_alive()
    finally:
        module._DESTROY_SECONDS = usual
        module.logger.removeHandler(handler)
    return seconds, [record.getMessage() for record in records]


def test_a_group_that_still_waits_does_not_hold_up_its_rank(pool: RankPool) -> None:
    timeout = paced(5.0).total_seconds()
    (seconds, said), (others_seconds, others_said) = pool.run(forgotten, timeout, ranks=range(2))
    assert 0.5 <= seconds < timeout - 1.0
    assert said == [
        "group waiting: gloo still waits for an operation; left to a thread until the group's timeout"
    ]
    assert others_seconds < timeout - 1.0
    assert others_said == []
