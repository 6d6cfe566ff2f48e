"""Deferred lanes: memory that a thread of the host drops before the device is done with it, and what threads cost."""

from __future__ import annotations

import time
from datetime import timedelta

import npu
import torch
import torch.distributed as dist
from npu_lanes import assert_all, forward_end, send, sized

import ldt
from ldt._C import Lane, SocketLinks
from ldt.testing import RankPool
from ldt.topology import Topology

WORLD_SIZE = 3


def _connect() -> ldt.Mesh:
    return ldt.connect(Topology([1, 1, 1]), "hccl", transport="host")


def _separate_targets() -> None:
    """Small targets that were not made together: each message comes in staging memory."""
    with npu.late(12, 3000, copy_engine=False) as device, _connect() as mesh:
        end, checks = forward_end(mesh), []
        sizes = (100, 7, 33)
        for number in range(30):
            message = [torch.full((size,), number, dtype=torch.uint8, device=device) for size in sizes]
            if end is not None and end.sends:
                end.send(message, "data")
            elif end is not None:
                targets = [end.lane.empty((size,), torch.uint8) for size in sizes]
                end.receive(targets, "data").wait()
                checks += [(target == number).all() for target in targets]
        if checks:
            assert_all(checks)


def test_staging_memory_outlives_its_copies(pool: RankPool) -> None:
    pool.run(_separate_targets, timeout=60)


def _aborted() -> None:
    """The lane is aborted while copies to a target wait for its last use. late() finds writes to freed memory."""
    with npu.late(13, 0, copy_engine=False) as device:
        mesh = _connect()
        end, nbytes = forward_end(mesh), 40 << 20
        if end is not None and not end.sends:
            target = torch.empty(nbytes // 4, dtype=torch.int32, device=device)
            npu.sleep(1000)
            end.receive([target], "doomed")
            del target
        dist.barrier()
        if end is not None and end.sends:
            send(end, sized(device, nbytes, 1))
        dist.barrier()
        time.sleep(0.3)
        if end is not None and not end.sends:
            end.lane.abort("the test aborts it")
            end.lane.close(0)
        dist.barrier()
        mesh.close()


def test_an_abort_frees_no_memory_in_use(pool: RankPool) -> None:
    pool.run(_aborted, timeout=60)


def _in_inference_mode() -> None:
    with npu.late(14, 200, copy_engine=False) as device:
        with torch.inference_mode():
            mesh = _connect()
        end, message = forward_end(mesh), sized(device, 5 << 20, 1)
        if end is not None and end.sends:
            send(end, message).wait()
        elif end is not None:
            target = end.lane.empty(message.shape, message.dtype)
            end.receive([target], "data").wait()
            assert_all([(target == message).all()])
        mesh.close()


def test_connect_in_inference_mode(pool: RankPool) -> None:
    pool.run(_in_inference_mode, timeout=60)


def _processor_time() -> float:
    """Seconds in two in which a message is awaited."""
    with npu.late(15, 0, copy_engine=False) as device, _connect() as mesh:
        end, message, took = forward_end(mesh), sized(device, 1 << 20, 1), 0.0
        if end is not None and not end.sends:
            end.receive([end.lane.empty(message.shape, message.dtype)], "late")
            time.sleep(0.2)
            start = time.process_time()
            time.sleep(2.0)
            took = time.process_time() - start
        dist.barrier()
        if end is not None and end.sends:
            send(end, message)
        return took


def test_awaiting_a_message_takes_no_processor_time(pool: RankPool) -> None:
    assert pool.run(_processor_time, timeout=60)[1] < 0.1


def _after_failure() -> float:
    """Seconds of a launch after a failure that is not reported yet, into memory of the message that failed."""
    with npu.late(16, 0, copy_engine=False) as device:
        mesh = _connect()
        end, took = forward_end(mesh), 0.0
        if end is not None and end.sends:
            npu.sleep(500)
            send(end, torch.zeros(1024, device=device))
            end.lane.abort("the test aborts it")
        elif end is not None:
            end.receive([end.lane.empty((1024,), torch.float32)], "doomed")
            time.sleep(1.0)
            start = time.monotonic()
            end.receive([end.lane.empty((1024,), torch.float32)], "next")
            took = time.monotonic() - start
            end.lane.close(0)
        dist.barrier()
        mesh.close()
        return took


def test_a_launch_after_a_failure_returns_at_once(pool: RankPool) -> None:
    assert pool.run(_after_failure, timeout=60)[1] < 1.0


def _ahead_of_a_stuck_device() -> float:
    """Seconds to drop a lane whose group takes no more messages and cannot be aborted, but times out."""
    with npu.late(17, 0, copy_engine=False) as device:
        group = dist.new_group([0, 1], backend=npu.WITHOUT_ABORT, timeout=timedelta(seconds=8))
        took = 0.0
        if dist.get_rank() == 0:
            links = SocketLinks(links={}, lane=0)  # all peers are reached over the group
            lane = Lane("stuck", p2p=group, stage=None, device=device, timeout=20.0, transport=links)
            message = [torch.zeros(1 << 17, dtype=torch.uint8, device=device)] * 16
            for _ in range(60):
                lane.send(message, 1)
            time.sleep(0.5)
            start = time.monotonic()
            lane.abort("the test aborts it")
            del lane
            took = time.monotonic() - start
        dist.barrier()
        return took


def test_a_lane_ends_although_the_device_is_stuck(pool: RankPool) -> None:
    assert pool.run(_ahead_of_a_stuck_device, timeout=60)[0] < 5.0
