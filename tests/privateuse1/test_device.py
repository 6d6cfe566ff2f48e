"""The test device detects the errors that the other tests rely on it to detect."""

from __future__ import annotations

import time
from collections.abc import Callable

import npu
import pytest
import torch
import torch.distributed as dist

from ldt.testing import RankPool, in_time

WORLD_SIZE = 2


def _unordered_read() -> None:
    with npu.late(0, most_microseconds=0) as device:
        source = torch.ones(100, device=device)
        side = torch.Stream(device)
        with side:
            npu.sleep(100)
            late = source * 2
        early = late.clone()  # of memory that was not written to yet
        side.synchronize()
        assert early.isnan().all().item()
        assert (late == 2).all().item()


def _ordered_read() -> None:
    with npu.late(0, most_microseconds=0) as device:
        source = torch.ones(100, device=device)
        side = torch.Stream(device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            npu.sleep(100)
            late = source * 2
            event = side.record_event()
        torch.accelerator.current_stream().wait_event(event)
        assert (late == 2).all().item()


def _freed_while_read(recorded: bool) -> None:
    with npu.late(0, most_microseconds=0) as device:
        source = torch.ones(100, device=device)
        torch.accelerator.synchronize()
        side = torch.Stream(device)
        with side:
            npu.sleep(100)
            copy = source.clone()
        if recorded:
            source.record_stream(side)
        del source
        side.synchronize()
        with side:
            assert ((copy == 1) if recorded else copy.isnan()).all().item()


def _write_late() -> None:
    with npu.late(0, most_microseconds=0) as device:
        target = torch.ones(100, device=device)
        torch.accelerator.synchronize()
        side = torch.Stream(device)
        with side:
            npu.sleep(100)
            target.fill_(3)
        del target


def _late_write() -> None:
    with pytest.raises(AssertionError, match="1 blocks of memory"):
        _write_late()


def _error_on_a_stream() -> None:
    with npu.late(0, most_microseconds=0) as device:
        table = torch.ones(4, 3, device=device)
        torch.nn.functional.embedding(torch.tensor([7], device=device), table)
        with pytest.raises(RuntimeError, match="a stream of the test device failed: index out of range"):
            torch.accelerator.synchronize()


def _late_stream() -> None:
    with npu.late(0, most_microseconds=0) as device:
        source = torch.ones(10, device=device)
        side = torch.Stream(device)
        npu.start().delay(side, seed=1, most_microseconds=20_000)
        start = time.monotonic()
        for _ in range(40):
            source.add_(1)
        torch.accelerator.current_stream().synchronize()
        on_time = time.monotonic() - start
        with side:
            for _ in range(40):
                source.add_(1)
        side.synchronize()
        assert time.monotonic() - start > on_time + 0.04


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_is_poisoned_when_freed_unless_its_use_was_recorded(pool: RankPool, recorded: bool) -> None:
    pool.run(_freed_while_read, recorded, ranks=[0])


@pytest.mark.parametrize("check", [_unordered_read, _ordered_read, _error_on_a_stream, _late_stream])
def test_stream_errors_are_detected(pool: RankPool, check: Callable[[], None]) -> None:
    pool.run(check, ranks=[0])


def test_writes_to_freed_memory_are_found() -> None:
    with RankPool(1) as pool:  # its own pool: detection stays on in this process
        pool.run(_late_write)


def _group() -> None:
    with npu.late(5) as device:
        group = npu.hccl_group(0, 1)
        rank = dist.get_rank()
        npu.sleep(1000)
        start = time.monotonic()
        total = torch.full((3,), float(rank + 1), device=device)
        works = [dist.all_reduce(total, group=group, async_op=True)]
        sent = torch.full((3,), rank, device=device)
        works.append(dist.broadcast(sent, src=1, group=group, async_op=True))
        passed = torch.full((3,), 7 * rank, device=device)
        works.append((dist.isend if rank else dist.irecv)(passed, 1 - rank, group=group))
        for work in works:
            work.wait()
        assert in_time(time.monotonic() - start, 0.8)  # the host ran ahead
        assert total.tolist() == [3.0] * 3
        assert sent.tolist() == [1] * 3
        assert passed.tolist() == [7] * 3
        dist.barrier(group=group)


def test_operations_of_a_group_run_in_the_order_of_streams(pool: RankPool) -> None:
    pool.run(_group)


def _model() -> None:
    with npu.late(6) as device:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU())
        x = torch.randn(4, 8)
        model(x).square().mean().backward()
        expected = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        model.to(device)
        model(x.to(device)).square().mean().backward()
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert grad is not None
            torch.testing.assert_close(parameter.grad.cpu(), grad)


def test_a_model_trains_on_it(pool: RankPool) -> None:
    pool.run(_model)
