"""Stages of any sizes with sharded layers, replicas that share edges, and laps equal the unsplit model.

Sums over ranks and over replicas have another order there, so equal means within 1e-6.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ldt
from ldt.testing import RankPool, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 12
TP = [[1, 2], [2, 1], [1, 4], [2, 4], [2, 1, 2], [1, 3, 2]]
REPLICAS = [(1, 1), (2, 1), (2, 2)]  # dp and edge_dp
CASES = [  # each number of laps with every other pair of a shape and replicas; `make slow` runs the rest
    pytest.param(tp, *replicas, laps, marks=[pytest.mark.slow] if (row + column + laps) % 2 else [])
    for row, tp in enumerate(TP)
    for column, replicas in enumerate(REPLICAS)
    for laps in (1, 2)
]
MICROBATCHES = 3  # per edge replica: not a multiple of the number of replicas that it serves


class Layers(nn.Module):
    """Two layers that can be sharded over 2, 3 or 4 ranks, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


def run(tp: list[int], dp: int, edge_dp: int, laps: int, ranks: Sequence[int] | None = None) -> float:
    topology = Topology(tp, dp=dp, edge_dp=edge_dp, laps=laps)
    torch.manual_seed(0)
    chunks = [Layers() for _ in range(topology.num_chunks)]
    batches = [toy_microbatches(MICROBATCHES, seed=seed) for seed in range(edge_dp)]
    unsplit = [unsplit_step(chunks, batch, toy_loss) for batch in batches]
    with ldt.connect(topology, ranks=ranks or range(topology.world_size)) as mesh:
        mine = [copy.deepcopy(chunks[index]) for index in topology.chunks_of(mesh.stage)]
        for chunk in mine if mesh.tp_mesh.size() > 1 else []:
            parallelize_module(chunk, mesh.tp_mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss)
        result = pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
        if mesh.is_edge:
            assert result.losses is not None
            torch.testing.assert_close(result.losses, unsplit[mesh.replica][0], rtol=1e-6, atol=1e-6)
        expected = mean_gradients([reference for _, reference in unsplit])
        for index, chunk in zip(topology.chunks_of(mesh.stage), mine, strict=True):
            for (name, parameter), grad in zip(chunk.named_parameters(), expected[index], strict=True):
                assert close(parameter.grad, grad), f"chunk {index}, {name}"
        squares = sum(float(grad.double().square().sum()) for grads in expected for grad in grads)
        norm = ldt.clip_grad_norm_(pipeline.parameters(), 1e6, mesh)
        assert norm.item() == pytest.approx(squares**0.5, rel=1e-5)
        return norm.item()


def mean_gradients(references: list[list[nn.Module]]) -> list[list[Tensor]]:
    """Average over the replicas of the edge, by chunk."""
    by_chunk = zip(*references, strict=True)
    return [
        [
            sum(p.grad for p in same) / len(same)
            for same in zip(*(m.parameters() for m in modules), strict=True)
        ]  # type: ignore[misc]
        for modules in by_chunk
    ]


def close(mine: Tensor | None, expected: Tensor) -> bool:
    """Compare within 1e-6 of the largest element."""
    assert mine is not None
    whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
    assert expected.abs().max() > 0
    return bool((whole - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize(("tp", "dp", "edge_dp", "laps"), CASES, ids=str)
def test_unequal_stages(pool: RankPool, tp: list[int], dp: int, edge_dp: int, laps: int) -> None:
    size = Topology(tp, dp=dp, edge_dp=edge_dp).world_size
    norms = pool.run(run, tp, dp, edge_dp, laps, ranks=range(size), timeout=60)
    assert len(set(norms)) == 1


def two_at_once(edge_dp: int) -> float:
    """Two replicas: odd and even ranks, each a separate pipeline in its own order."""
    even = dist.get_rank() % 2 == 0
    size = Topology([1, 2], dp=2, edge_dp=edge_dp).world_size
    return run([1, 2], 2, edge_dp, 1, range(0, 2 * size, 2) if even else range(2 * size - 1, 0, -2))


@pytest.mark.parametrize("edge_dp", [1, 2])
def test_two_pipelines_with_replicas(pool: RankPool, edge_dp: int) -> None:
    size = Topology([1, 2], dp=2, edge_dp=edge_dp).world_size
    assert len(set(pool.run(two_at_once, edge_dp, ranks=range(2 * size), timeout=60))) == 1
