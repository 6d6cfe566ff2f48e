"""How lanes end: abort, close, a dead peer, Ctrl-C, an exiting interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from lane_world import MEMBER, SENDER, error_of, fused_lane, launch

from ldt._C import Lane
from ldt.testing import RankPool, allowed, in_time

WORLD_SIZE = 3


def _abort() -> None:
    lane = fused_lane()
    works = [launch(lane, [torch.ones(10)])[0] for _ in range(3 if dist.get_rank() != SENDER else 0)]
    start = time.monotonic()
    lane.abort("stage 2 has failed")
    for work in works:
        assert error_of(work.wait) == "stage 2 has failed"
    assert "stage 2 has failed" in error_of(lambda: launch(lane, [torch.ones(1)]))
    lane.close()
    assert in_time(time.monotonic() - start, 2)


def test_an_abort_ends_pending_and_later_messages(pool: RankPool) -> None:
    pool.run(_abort)


def _timeout() -> str:
    lane = fused_lane(timeout=0.3)
    if dist.get_rank() == SENDER:
        return ""
    work, _ = launch(lane, [torch.ones(10)], "F0 microbatch 3")
    return error_of(work.wait)


def test_a_message_that_times_out_is_named(pool: RankPool) -> None:
    _, leader, member = pool.run(_timeout)
    assert "receive F0 microbatch 3 from rank 0 of float32[10] (40 bytes) failed after 0.3" in leader
    assert "receive F0 microbatch 3 from the stage's leader" in member
    assert "(40 bytes): the broadcast inside the stage failed after 0.3" in member
    assert "within the lane's timeout of 300 ms" in member


def _endless_timeouts() -> None:
    for timeout in (timedelta.max, 1e18, float("inf"), 10**30):
        lane = fused_lane(timeout=timeout)
        work, arrived = launch(lane, [torch.arange(5.0)])
        work.wait(timedelta(days=100_000_000))  # torch's own conversion overflows beyond 292,000 years
        assert torch.equal(arrived[0], torch.arange(5.0))
        lane.close(timeout)


def test_no_timeout_is_too_long(pool: RankPool) -> None:
    pool.run(_endless_timeouts)


def _invalid_timeouts() -> None:
    lane = fused_lane()
    for timeout in (float("nan"), -1.0, -1, float("-inf"), timedelta(seconds=-1), timedelta.min):
        make = partial(Lane, "x", p2p=dist.group.WORLD, stage=None, timeout=timeout)
        assert "lane x: timeout: expected a time of 0 or more, got" in error_of(make)
        assert "lane fused: timeout: expected a time" in error_of(partial(lane.close, timeout))
    make = partial(Lane, "x", p2p=dist.group.WORLD, stage=None, timeout=0.0)
    assert "lane x: timeout: expected a positive time" in error_of(make)
    for wrong in ("3", None, True):
        error_of(partial(lane.close, wrong), TypeError)
    work, _ = launch(lane, [torch.ones(5)])
    text = error_of(partial(work.wait, timedelta(seconds=-1)))
    assert "timeout: expected a time of 0 or more, got -1000 ms" in text
    work.wait()
    lane.close()


def test_invalid_timeouts_are_refused_by_name(pool: RankPool) -> None:
    pool.run(_invalid_timeouts)


def _lose_the_member() -> None:
    lane = fused_lane()
    rank = dist.get_rank()
    launch(lane, [torch.ones(1)])[0].wait()
    dist.barrier()
    if rank == MEMBER:
        time.sleep(0.5)  # until the others have left the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    work, _ = launch(lane, [torch.ones(10)], "F0 microbatch 3")
    if rank == SENDER:
        work.wait()
        return
    text = error_of(work.wait)
    assert "receive F0 microbatch 3 from rank 0" in text
    assert ": the broadcast inside the stage " in text


def test_a_member_that_dies_is_not_mistaken_for_the_sender() -> None:
    with RankPool(3) as pool, pytest.raises(AssertionError, match="rank 2 died") as died:
        pool.run(_lose_the_member)
    assert "failed:" not in str(died.value)


def _lose_the_sender() -> str:
    lane = fused_lane()
    rank = dist.get_rank()
    dist.barrier()
    if rank == SENDER:
        time.sleep(0.5)  # until the others have left the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == MEMBER:
        return ""  # a member waits for the leader's broadcast, not for the sender
    start = time.monotonic()
    text = error_of(launch(lane, [torch.ones(10)], "F0 microbatch 3")[0].wait)
    assert in_time(time.monotonic() - start, 5)
    return text


def test_a_sender_that_dies_is_noticed_at_once() -> None:
    with RankPool(3) as pool:
        pool.run(dist.barrier)
        with pytest.raises(AssertionError, match="rank 0 died with exit code -9") as died:
            pool.run(_lose_the_sender)
    assert "failed:" not in str(died.value)


def _script(body: str) -> subprocess.Popen[str]:
    head = """
        import os, sys, threading, time, datetime, tempfile, signal
        import torch, torch.distributed as dist
        from ldt._C import Lane
        store = dist.HashStore()
        def world(rank, out):
            out[rank] = dist.ProcessGroup(dist.PrefixStore("g", store), rank, 2)
            backend = dist.ProcessGroupGloo(dist.PrefixStore("b", store), rank, 2, datetime.timedelta(seconds=60))
            out[rank]._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        groups = {}
        threads = [threading.Thread(target=world, args=(rank, groups)) for rank in range(2)]
        [t.start() for t in threads]; [t.join() for t in threads]
        s = datetime.timedelta(seconds=1)
        lane = Lane("solo", p2p=groups[0], stage=None)
        work = lane.recv([torch.empty(8)], 1)
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ctrl_c_ends_a_wait() -> None:
    process = _script("""
        try:
            print("waiting", flush=True)
            work.wait()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.2)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=allowed(60))
    assert in_time(time.monotonic() - start, 5)
    assert output == "interrupted\n", errors
    assert process.returncode == 0, errors


@pytest.mark.parametrize(
    "end", ["pass", "del lane", "del lane, work", "raise SystemExit(0)", "lane.close(datetime.timedelta())"]
)
def test_the_interpreter_exits_with_a_message_in_flight(end: str) -> None:
    process = _script(f"send = lane.send([torch.ones(100)], 1)\n{end}")
    _, errors = process.communicate(timeout=allowed(60))
    assert process.returncode == 0, errors
