"""The worker pool of the other tests detects failures, deaths and hangs, and can be used again afterwards."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ldt.testing import RankError, RankPool, in_time, slowness

WORLD_SIZE = 2


def add(a: int, b: int) -> tuple[int, int, int]:
    total = torch.tensor([float(a)])
    dist.all_reduce(total)
    return dist.get_rank(), int(total.item()), b


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("the key to everything")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def process_id() -> int:
    return os.getpid()


def test_results_come_by_rank(pool: RankPool) -> None:
    assert pool.run(add, 3, 4) == [(0, 6, 4), (1, 6, 4)]


def test_processes_stay(pool: RankPool) -> None:
    first = pool.run(process_id)
    assert pool.run(process_id) == first
    assert len({os.getpid(), *first}) == 3
    assert pool.run(process_id, ranks=[1]) == first[1:]


def test_a_failure_has_its_traceback_and_the_pool_goes_on(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(fail_on, 1)
    assert "rank 1 failed" in str(caught.value)
    assert "KeyError: 'the key to everything'" in str(caught.value)
    assert "in fail_on" in str(caught.value)
    assert pool.run(add, 1, 1) == [(0, 2, 1), (1, 2, 1)]


def test_a_death_is_seen(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 died with exit code 7"):
        pool.run(die_on, 0)
    assert pool.run(add, 1, 1) == [(0, 2, 1), (1, 2, 1)]


def late_on(rank: int, seconds: float) -> int:
    time.sleep(seconds if dist.get_rank() == rank else 0.0)
    return rank


def test_a_slow_machine_has_longer(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowness, "_IDLE_SECONDS", 1e-4)
    assert pool.run(late_on, 1, 0.5, timeout=0.1) == [1, 1]


def test_a_hang_is_ended_and_shown(pool: RankPool) -> None:
    pool.run(process_id)
    processes = pool.processes
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(hang_on, 1, timeout=1.0)
    assert in_time(time.monotonic() - start, 5.0)
    assert "ranks [1] were not done after 1 s" in str(caught.value)
    assert "in hang_on" in str(caught.value), "where it stands"
    assert all(process.exitcode is not None for process in processes)


def cannot_be_pickled() -> object:
    return lambda: 0


def test_a_result_that_cannot_be_pickled_is_an_error_with_text(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(cannot_be_pickled)
    assert "rank 0 failed" in str(caught.value)
    assert "died" not in str(caught.value)
    assert "pickle" in str(caught.value)


def environment_of_the_server() -> list[bytes]:
    return Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_the_server_imports_torch_without_other_backends(pool: RankPool) -> None:
    before = dict(os.environ)
    assert b"TORCH_DEVICE_BACKEND_AUTOLOAD=0" in pool.run(environment_of_the_server)[0]
    assert dict(os.environ) == before


def test_no_process_is_left() -> None:
    with RankPool(2) as pool:
        pool.run(process_id)
        processes = pool.processes
    assert [process.exitcode for process in processes] == [0, 0]
