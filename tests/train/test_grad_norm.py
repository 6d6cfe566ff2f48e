"""clip_grad_norm_ over all stages equals torch's on the unsplit model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ldt
from ldt.runtime import TensorSpec
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 6


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


class TwoLayers(nn.Module):
    def output_spec(self, inputs: TensorSpec) -> TensorSpec:
        return TensorSpec(inputs.shape, inputs.dtype, requires_grad=True)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 36), nn.Linear(36, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


def sharded(tp: list[int], dp: int, over_replicas: bool) -> list[float]:
    """Layers sharded over the ranks of a stage, beside a replicated one."""
    topology = Topology(tp, dp=dp)
    torch.manual_seed(0)
    chunks = [TwoLayers() for _ in range(topology.num_chunks)]
    batch = toy_microbatches(3)
    _, reference = unsplit_step(chunks, batch, toy_loss)
    expected = nn.utils.clip_grad_norm_([p for chunk in reference for p in chunk.parameters()], 1e-2)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        for chunk in mine:
            shard(chunk, mesh, over_replicas)
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss)
        pipeline.step(batch if mesh.is_edge else None)
        norm = ldt.clip_grad_norm_(pipeline.parameters(), 1e-2, mesh)
        for index, chunk in zip(topology.chunks_of(mesh.stage), mine, strict=True):
            for parameter, theirs in zip(chunk.parameters(), reference[index].parameters(), strict=True):
                grad = parameter.grad
                whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                torch.testing.assert_close(whole, theirs.grad)
        return [norm.item(), expected.item()]


def shard(chunk: nn.Module, mesh: ldt.Mesh, over_replicas: bool) -> None:
    if mesh.tp_mesh.size() > 1:
        parallelize_module(chunk, mesh.tp_mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if over_replicas:
        fully_shard(chunk, mesh=mesh.dp_mesh)


@pytest.mark.parametrize(
    ("tp", "dp", "over_replicas"),
    [
        ([1, 2], 1, False),
        ([2, 1], 1, False),
        ([1, 3], 1, False),
        ([1, 2, 1], 1, False),
        ([1, 2], 2, False),
        ([1, 1], 2, True),
        ([1, 2], 2, True),
        ([2, 1], 2, True),
    ],
)
def test_shards_count_where_they_are(pool: RankPool, tp: list[int], dp: int, over_replicas: bool) -> None:
    for norm, expected in pool.run(sharded, tp, dp, over_replicas, ranks=range(sum(tp) * dp)):
        assert norm == pytest.approx(expected, rel=1e-5)


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
