"""Copy engine lanes on the test device: processes write into each other's memory, and all streams run late.

A flag that is not waited for, memory that is written to too early, or a slot that is filled twice shows as wrong data.
"""

from __future__ import annotations

import random
import time

import npu
import pytest
import torch
import torch.distributed as dist
from npu_lanes import assert_all, forward_end, sized

import ldt
from ldt.testing import RankPool
from ldt.topology import Topology

WORLD_SIZE = 3
KIB = 1024


def _messages(seed: int, rounds: int, tp: list[int], transport: str) -> int:
    """Messages of random sizes into memory of the lane and other memory, with fast and slow hosts."""
    alike, own = random.Random(seed), random.Random(seed * 10 + dist.get_rank())
    topology = Topology(tp)
    if dist.get_rank() >= topology.world_size:
        return 0
    with npu.late(seed, 300) as device, torch.Stream(device):
        options = {"transport": transport, "ranks": range(topology.world_size)}
        with ldt.connect(topology, "hccl", **options) as mesh:
            end = forward_end(mesh)
            checks, waiting = [], []
            for number in range(rounds):
                sizes = [
                    alike.choice([4, 4 * KIB, 36 * KIB, 9 * KIB * KIB])
                    for _ in range(alike.choice([1, 1, 3]))
                ]
                foreign = [alike.random() < 0.3 for _ in sizes]
                ahead = alike.choice([0, 0, 1, 4])
                if own.random() < 0.3:
                    time.sleep(own.random() * 0.004)
                sources = [sized(device, size, number) for size in sizes]
                if end is None:
                    continue
                if end.sends:
                    work = end.send(sources, "data")
                    assert work is not None
                    work.wait()
                    for source in sources:
                        source.fill_(-1)  # at once, behind the wait
                    continue
                targets = [
                    torch.zeros_like(source) if other else end.lane.empty(source.shape, source.dtype)
                    for source, other in zip(sources, foreign, strict=True)
                ]
                waiting.append((end.receive(targets, "data"), targets, sources))
                while len(waiting) > ahead:
                    work, targets, expected = waiting.pop(0)
                    work.wait()
                    checks += [(got == wanted).all() for got, wanted in zip(targets, expected, strict=True)]
                    del targets  # its memory may be reused while its last use is still queued
            for work, targets, expected in waiting:
                work.wait()
                checks += [(got == wanted).all() for got, wanted in zip(targets, expected, strict=True)]
            if checks:
                assert_all(checks)
            return int(end.lane.stats()["bounced"]) if end is not None and not end.sends else 0


@pytest.mark.parametrize("tp", [[1, 1], [1, 2], [2, 1]], ids=str)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("transport", ["copy_engine", "host"])
def test_data_are_right_whichever_end_comes_first(
    pool: RankPool, tp: list[int], seed: int, transport: str
) -> None:
    pool.run(_messages, seed, 60, tp, transport, timeout=60)


def _more_than_the_ring_holds() -> None:
    with npu.late(3, 0) as device, ldt.connect(Topology([1, 1, 1]), "hccl") as mesh:
        end, checks = forward_end(mesh), []
        if end is None:
            return
        for first in range(0, 2400, 600):  # a sender that is far ahead, then a receiver
            numbers = range(first, first + 600)
            if end.sends:
                for number in numbers:
                    end.send([torch.full((8,), number, device=device)], "data")
                continue
            targets = [end.lane.empty((8,), torch.int64) for _ in numbers]
            for work in [end.receive([target], "data") for target in targets]:
                work.wait()
            checks += [(target == number).all() for number, target in zip(numbers, targets, strict=True)]
        if checks:
            assert_all(checks)


def test_the_message_ring_wraps_around(pool: RankPool) -> None:
    pool.run(_more_than_the_ring_holds, timeout=60)


def _written_in_place(waits: bool) -> None:
    """After wait, or by the next message into the same tensor, while the stage still reads it."""
    with npu.late(5, 300) as device, ldt.connect(Topology([1, 2]), "hccl", transport="copy_engine") as mesh:
        end, checks = forward_end(mesh), []
        assert end is not None
        for number in range(0, 8, 2):
            if end.sends:
                for each in (number, number + 1):
                    end.send([torch.full((4096,), each, device=device)], "data")
                continue
            if dist.get_rank() == 2:
                time.sleep(0.05)  # so that this rank reads the leader's memory instead of being written to
            target = end.lane.empty((4096,), torch.int64)
            first = end.receive([target], "data")
            if waits or dist.get_rank() == 2:
                first.wait()
                checks.append((target == number).all())
                target.fill_(-1)
            end.receive([target], "data").wait()
            checks.append((target == number + 1).all())
        if checks:
            assert_all(checks)


@pytest.mark.parametrize("waits", [True, False])
def test_received_tensors_may_be_written_to_after_wait(pool: RankPool, waits: bool) -> None:
    pool.run(_written_in_place, waits, timeout=60)


def _dropped() -> None:
    """The leader drops each message unread, so its block is free for the next one."""
    with npu.late(5, 300) as device, ldt.connect(Topology([1, 2]), "hccl", transport="copy_engine") as mesh:
        end, checks = forward_end(mesh), []
        assert end is not None
        for number in range(8):
            if end.sends:
                end.send([torch.full((4096,), number, device=device)], "data")
                continue
            if dist.get_rank() == 2:
                time.sleep(0.05)
            target = end.lane.empty((4096,), torch.int64)
            work = end.receive([target], "data")
            if dist.get_rank() == 2:
                work.wait()
                checks.append((target == number).all())
            del target
        if checks:
            assert_all(checks)


def test_a_block_is_not_reused_while_the_stage_reads_it(pool: RankPool) -> None:
    pool.run(_dropped, timeout=60)


def _lent_again() -> None:
    """A block far too large for the next message is returned, and reused for it while it is still read."""
    with npu.late(5, 0) as device, ldt.connect(Topology([1, 1, 1]), "hccl", transport="copy_engine") as mesh:
        end = forward_end(mesh)
        if end is None:
            return
        if end.sends:
            end.send([torch.ones(1 << 20, dtype=torch.int64, device=device)], "large")
            end.send([torch.full((16,), 99, device=device)], "small")
            return
        large = end.lane.empty((1 << 20,), torch.int64)
        end.receive([large], "large").wait()
        npu.sleep(500)
        total = large.sum()
        del large
        small = end.lane.empty((16,), torch.int64)
        end.receive([small], "small").wait()
        assert_all([total == 1 << 20, (small == 99).all()])


def test_a_returned_block_is_not_written_to_while_it_is_read(pool: RankPool) -> None:
    pool.run(_lent_again, timeout=60)
