"""Calls on a stream lane block neither the host nor queued compute; a lane refuses mistakes and can be aborted."""

from __future__ import annotations

import time

import npu
import pytest
import torch
import torch.distributed as dist
from npu_lanes import SENDER, fused_lane, is_sender, launch

from ldt._C import LaneError
from ldt.testing import RankPool, in_time

WORLD_SIZE = 3


def _host_does_not_block() -> tuple[float, bool]:
    with npu.late(0, most_microseconds=0) as device:
        lane = fused_lane(device)
        first = torch.ones(4, device=device)
        work, (target,) = launch(lane, [first])  # the first call is slow
        work.wait()
        (target == first).all().item()
        source = torch.ones(1 << 16, device=device)
        dist.barrier()
        start = time.monotonic()
        npu.sleep(1500)
        work, (target,) = launch(lane, [source])
        work.wait()
        right = (target == 1).all()
        other = torch.Stream(device)
        with other:
            work.wait()  # a second stream may wait, too
            right_there = (target == 1).all()
        seconds = time.monotonic() - start
        done_early = work.is_completed()
        assert right.item()
        other.synchronize()
        assert right_there.item()
        assert work.is_completed()
        assert work.is_success()
        lane.close()
    return seconds, done_early


def test_neither_launch_nor_wait_blocks_the_host(pool: RankPool) -> None:
    results = pool.run(_host_does_not_block)
    for seconds, _ in results:
        assert in_time(seconds, 1.0)
    assert not results[SENDER][1]


def _pooled_receive_overtakes_compute() -> list[bool]:
    """Whether a message lands while compute that was queued before the receive still runs."""
    landed = []
    with npu.late(0, most_microseconds=0) as device:
        lane = fused_lane(device)
        for pooled in (True, False):
            source = torch.ones(1000, device=device)
            dist.barrier()
            if is_sender():
                lane.send([source], 1).wait()
                torch.accelerator.synchronize()
                dist.barrier()
                continue
            target = lane.empty([1000], torch.float32) if pooled else torch.zeros(1000, device=device)
            compute = torch.accelerator.current_stream()
            npu.sleep(1000)
            work = lane.recv([target], SENDER)
            while not work.is_completed() and not compute.query():
                time.sleep(0.01)
            landed.append(not compute.query())
            dist.barrier()
            work.wait()
            assert (target == 1).all().item()
        lane.close()
    return landed


def test_a_receive_into_the_pool_does_not_wait_for_queued_work(pool: RankPool) -> None:
    _, leader, _ = pool.run(_pooled_receive_overtakes_compute)
    assert leader == [True, False]


def _abort_of_a_receive() -> float:
    with npu.late(4) as device:
        lane = fused_lane(device)
        work, _ = launch(lane, [torch.ones(4, device=device)])
        work.wait()
        torch.accelerator.synchronize()
        start = time.monotonic()
        if not is_sender():
            target = torch.zeros(4, device=device)
            work = lane.recv([target], SENDER)  # for a message that never comes
            lane.abort("stage 0 has failed")
            with pytest.raises(LaneError, match="stage 0 has failed"):
                work.wait()
        lane.close()
        torch.accelerator.synchronize()
    return time.monotonic() - start


def test_an_abort_frees_the_device(pool: RankPool) -> None:
    assert in_time(max(pool.run(_abort_of_a_receive)), 10)
