"""clip_grad_norm_ over all stages equals torch's on the unsplit model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import ldt
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 4


def clipped(tp: list[int], dp: int, max_norm: float) -> float:
    topology = Topology(tp, dp=dp)
    chunks = toy_chunks(topology)
    batch = toy_microbatches(3)
    _, reference = unsplit_step(chunks, batch, toy_loss)
    expected = nn.utils.clip_grad_norm_([p for chunk in reference for p in chunk.parameters()], max_norm)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks)
        pipeline.step(batch if mesh.is_edge else None)
        norm = ldt.clip_grad_norm_(pipeline.parameters(), max_norm, mesh)
        torch.testing.assert_close(norm, expected)
        for index in topology.chunks_of(mesh.stage):
            for mine, theirs in zip(chunks[index].parameters(), reference[index].parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)
        return norm.item()


@pytest.mark.parametrize("max_norm", [1e-2, 1e6])
@pytest.mark.parametrize(("tp", "dp"), [([1], 1), ([1, 1, 1], 1), ([1, 2, 1], 1), ([2, 1], 1), ([1, 1], 2)])
def test_norm_of_the_whole_model(pool: RankPool, tp: list[int], dp: int, max_norm: float) -> None:
    norms = pool.run(clipped, tp, dp, max_norm, ranks=range(sum(tp) * dp))
    assert len(set(norms)) == 1
    assert norms[0] > 1e-2


def sharded() -> str:
    """Rank 1 has a parameter of the kind that parallelize_module makes; then all clip without it."""
    topology = Topology([1, 1])
    chunks = toy_chunks(topology)
    with ldt.connect(topology, ranks=[0, 1]) as mesh:
        pipeline = build(mesh, chunks)
        pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        parameters = list(pipeline.parameters())
        before = [p.grad.clone() for p in parameters if p.grad is not None]
        odd = []
        if mesh.rank == 1:
            odd = [nn.Parameter(DTensor.from_local(torch.ones(4), mesh.tp_mesh, [Shard(0)]))]
            odd[0].grad = DTensor.from_local(torch.ones(4), mesh.tp_mesh, [Shard(0)])
        with pytest.raises(ldt.LdtError) as caught:
            ldt.clip_grad_norm_(parameters + odd, 1e-3, mesh)
        assert all(map(torch.equal, before, (p.grad for p in parameters if p.grad is not None)))
        ldt.clip_grad_norm_(parameters, 1e-3, mesh)
        return str(caught.value)


def test_sharded_parameters_are_refused(pool: RankPool) -> None:
    answers = pool.run(sharded, ranks=[0, 1])
    assert "sharded parameters (DTensor) yet: 0 on this rank, 1 on all ranks" in answers[0]
    assert "sharded parameters (DTensor) yet: 1 on this rank, 1 on all ranks" in answers[1]


def not_finite(value: float) -> Any:
    topology = Topology([1, 1])
    chunks = toy_chunks(topology)
    with ldt.connect(topology, ranks=[0, 1]) as mesh:
        pipeline = build(mesh, chunks)
        pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        if mesh.stage == 1:
            next(chunks[1].parameters()).grad[0, 0] = value  # type: ignore[index]
        norm = ldt.clip_grad_norm_(pipeline.parameters(), 1.0, mesh)
        return norm.item(), all(
            bool(p.grad.isfinite().all()) for p in pipeline.parameters() if p.grad is not None
        )


def test_a_norm_that_is_not_finite_is_seen_on_every_stage(pool: RankPool) -> None:
    for norm, _ in pool.run(not_finite, float("nan"), ranks=[0, 1]):
        assert norm != norm
    for norm, _ in pool.run(not_finite, float("inf"), ranks=[0, 1]):
        assert norm == float("inf")
