"""Ranks that make different collective calls all raise one clear error within seconds."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from pipeline_jobs import build, step_and_compare

import ldt
from ldt.runtime.health import desync
from ldt.runtime.health.desync import DesyncDetector
from ldt.testing import RankPool, in_time, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
TOPOLOGY = Topology([1, 1, 1])
SECONDS = 5.0
BATCH = toy_microbatches(2)


def clipping(who: list[int]) -> str:
    """Clip gradients between the steps, on the ranks ``who`` only."""
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        pipeline.step(BATCH if mesh.is_edge else None)
        start = time.monotonic()
        with pytest.raises(ldt.LdtError) as caught:  # noqa: PT012
            if mesh.rank in who:
                ldt.clip_grad_norm_(pipeline.parameters(), 1.0, mesh)
            pipeline.step(BATCH if mesh.is_edge else None)
        assert in_time(time.monotonic() - start, SECONDS)
        return str(caught.value)


@pytest.mark.parametrize("who", [[0], [1], [1, 2]])
def test_some_ranks_clip_and_the_others_step(pool: RankPool, who: list[int]) -> None:
    for answer in pool.run(clipping, who):
        assert "is in clip_grad_norm_() (call 3)" in answer
        assert "is in step() (call 3)" in answer
        assert answer.endswith("every rank must make the same calls in the same order")


def other_call(edge: str) -> tuple[str, bool]:
    """Only the edge makes another call while the others step. Messages of the two calls are not mixed up."""
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        result = pipeline.step(BATCH if mesh.is_edge else None)
        start = time.monotonic()
        with pytest.raises(ldt.LdtError) as caught:  # noqa: PT012
            if mesh.is_edge and edge == "gather_stats()":
                pipeline.gather_stats(result)
            elif mesh.is_edge:
                build(mesh, chunks)
            pipeline.step(BATCH if mesh.is_edge else None)
        assert in_time(time.monotonic() - start, SECONDS)
        return str(caught.value), mesh.failed


@pytest.mark.parametrize("edge", ["gather_stats()", "Pipeline()"])
def test_a_call_of_the_edge_alone(pool: RankPool, edge: str) -> None:
    for text, failed in pool.run(other_call, edge):
        assert failed
        assert f"is in {edge} (call 3)" in text
        assert "is in step() (call 3)" in text


def mixed_sums() -> str:
    """Sums of two different calls are not mixed up."""
    with ldt.connect(TOPOLOGY) as mesh:
        with pytest.raises(ldt.LdtError) as caught, mesh.collective("one()" if mesh.is_edge else "other()"):
            mesh.control.sum([1.0])
        return str(caught.value)


def test_sums_of_different_calls_are_not_mixed(pool: RankPool) -> None:
    for text in pool.run(mixed_sums):
        assert "every rank must make the same calls in the same order" in text


def failing_call() -> str:
    with ldt.connect(TOPOLOGY) as mesh:
        mesh.control.all_gather(None)  # no rank fails while others still connect
        start = time.monotonic()
        with (
            pytest.raises((ZeroDivisionError, ldt.RemoteStageError)) as caught,
            mesh.collective("clip_grad_norm_()"),
        ):
            mesh.control.sum([1 / (mesh.rank - 1)])
        assert in_time(time.monotonic() - start, SECONDS)
        return str(caught.value)


def test_a_failure_before_a_sum_is_reported(pool: RankPool) -> None:
    texts = pool.run(failing_call)
    assert "rank 1 (stage 1, replica 0) failed first in clip_grad_norm_(): ZeroDivisionError" in texts[0]
    assert "rank 1 (stage 1, replica 0) failed first in clip_grad_norm_(): ZeroDivisionError" in texts[2]


def stopping_early(who: int, late: float) -> str | None:
    """Rank ``who`` closes its mesh after two steps; the others run a third, ``late`` seconds later or earlier."""
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        for _ in range(2):
            step_and_compare(mesh, pipeline, chunks, BATCH)
        if mesh.rank == who:
            time.sleep(max(0.0, -late))
            return None
        time.sleep(max(0.0, late))
        start = time.monotonic()
        with pytest.raises(ldt.RemoteStageError) as caught:
            pipeline.step(BATCH if mesh.is_edge else None)
        assert in_time(time.monotonic() - start, SECONDS)
        return str(caught.value)


@pytest.mark.parametrize("late", [-1.5, 0.0, 1.5])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_rank_makes_fewer_steps(pool: RankPool, who: int, late: float) -> None:
    for rank, answer in enumerate(pool.run(stopping_early, who, late)):
        assert (answer is None) == (rank == who)
        if answer is not None:
            assert f"rank {who} closed its mesh after call 3" in answer
            assert "is in step() (call 4)" in answer


def closing_at_different_times() -> bool:
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        step_and_compare(mesh, build(mesh, chunks), chunks, BATCH)
        time.sleep(mesh.rank)
        return mesh.failed


def test_ranks_that_close_late_are_fine(pool: RankPool) -> None:
    assert pool.run(closing_at_different_times) == [False] * 3


def lonely_sum() -> str:
    with ldt.connect(TOPOLOGY, transfer_timeout=timedelta(seconds=0.5)) as mesh:
        if mesh.rank > 0:
            mesh.watchdog.wait(60.0)
            return ""
        with pytest.raises(ldt.LdtError) as caught, mesh:
            mesh.control.sum([1.0])
        return str(caught.value)


def test_a_sum_has_a_timeout(pool: RankPool) -> None:
    assert "waited 0.5 s for a sum over all ranks" in pool.run(lonely_sum)[0]


def test_a_call_is_compared_once_and_old_entries_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desync, "COMPARE_AFTER_SECONDS", 0.0)
    store = dist.HashStore()
    one, other = DesyncDetector("call", 1), DesyncDetector("call", 0)
    for _ in range(20):
        with one.calling("step()"), other.calling("step()"):
            assert one.compare(store) is other.compare(store) is one.compare(store) is None
    assert store.num_keys() <= 4
    assert one.compare(store) is None, "in no call"
    assert one.finish(store) is None
    assert other.finish(store) is None


def test_a_short_call_makes_no_store_request() -> None:
    calls = DesyncDetector("call", 0)
    with calls.calling("step()"):
        assert calls.compare(None) is None
