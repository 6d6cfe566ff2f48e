"""The edge exits normally before the other ranks have read its last messages."""

from __future__ import annotations

import atexit
import os
import time
from unittest import mock

import pytest
from pipeline_jobs import assert_equal_grads, build
from torch import Tensor

import ldt
from ldt.runtime.execution.loss import TokenScale
from ldt.testing import RankError, RankPool, toy_chunks, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 3
BATCH = toy_microbatches(2)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / target.shape[0]


def sum_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.shape[0]


def await_end_of_edge(mesh: ldt.Mesh) -> None:
    """Wait until the edge can send nothing more."""
    for inbox in mesh.edge_broadcast._inboxes.values():
        while not all(work.is_completed() for work, _ in inbox._frames):
            time.sleep(0.005)


def last_step(tp: list[int], how: str, ahead: bool) -> None:
    """Cloud leaders read the last token count after the edge has exited."""
    topology = Topology(tp)
    chunks = toy_chunks(topology)
    finish = TokenScale.finish
    mesh = ldt.connect(topology, ranks=range(topology.world_size))
    pipeline = build(mesh, chunks, sum_loss, loss_reduction="token")
    options = {"upcoming": BATCH} if mesh.is_edge and ahead else {}
    pipeline.step(BATCH if mesh.is_edge else None, **options)
    for chunk in chunks:
        chunk.zero_grad()
    _, reference = unsplit_step(chunks, BATCH, mean_loss)

    def late(scale: TokenScale, replicas: int) -> None:
        if not mesh.is_edge:
            await_end_of_edge(mesh)
        finish(scale, replicas)

    with mock.patch.object(TokenScale, "finish", late):
        pipeline.step(BATCH if mesh.is_edge else None)
    assert assert_equal_grads(mesh, chunks, reference) > 0
    if how == "exits" and mesh.is_edge:
        atexit._run_exitfuncs()
        os._exit(0)
    mesh.close()


@pytest.mark.parametrize("tp", [[1, 1, 1], [1, 2]])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_token_count_that_has_arrived_is_used(pool: RankPool, tp: list[int], ahead: bool) -> None:
    pool.run(last_step, tp, "closes", ahead)


def test_it_is_used_even_if_the_edge_exits(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(last_step, [1, 1, 1], "exits", False)
    assert str(caught.value) == "rank 0 died with exit code 0"


def called_off(mode: str) -> str:
    """The edge has no microbatches and exits; the others make that call later."""
    topology = Topology([1, 1, 1])
    with ldt.connect(topology) as mesh:
        pipeline = build(mesh, toy_chunks(topology))
        call = pipeline.step if mode == "step" else pipeline.eval
        call(BATCH if mesh.is_edge else None)
        if not mesh.is_edge:
            await_end_of_edge(mesh)
        with pytest.raises((ValueError, ldt.RemoteStageError)) as caught:
            call([] if mesh.is_edge else None)
        return str(caught.value)


@pytest.mark.parametrize("mode", ["step", "eval"])
def test_a_call_that_was_called_off_is_not_a_lost_connection(pool: RankPool, mode: str) -> None:
    for text in pool.run(called_off, mode)[1:]:
        assert f"rank 0, the edge, called {mode}() off: InputValueError: " in text
