"""loss_reduction="sum": gradients of the sum of losses over all microbatches of all replicas."""

from __future__ import annotations

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor

import ldt
from ldt.testing import RankPool, toy_chunks, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 4
NUMBER = 3


def sum_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def undivided(output: Tensor, target: Tensor) -> Tensor:
    """For unsplit_step, which divides by the number of microbatches."""
    return NUMBER * sum_loss(output, target)


def compare(topology: Topology) -> float:
    chunks = toy_chunks(topology)
    batches = [toy_microbatches(NUMBER, seed=seed) for seed in range(topology.edge_dp)]
    found = [unsplit_step(chunks, batch, undivided) for batch in batches]
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks, loss_fn=sum_loss, loss_reduction="sum")
        result = pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
        if mesh.is_edge:
            assert result.loss is not None
            torch.testing.assert_close(result.loss, torch.stack(found[mesh.replica][0]).sum() / NUMBER)
        for index in topology.chunks_of(mesh.stage):
            references = [reference[index].parameters() for _, reference in found]
            for got, *wanted in zip(chunks[index].parameters(), *references, strict=True):
                torch.testing.assert_close(got.grad, sum(one.grad for one in wanted))
        return float(ldt.clip_grad_norm_(pipeline.parameters(), 1.0, mesh))


@pytest.mark.parametrize(
    "topology",
    [
        Topology([1, 1, 1]),
        Topology([1, 1], dp=2),
        Topology([1, 1], dp=2, edge_dp=1),
    ],
    ids=Topology.to_text,
)
def test_gradients_are_those_of_the_sum(pool: RankPool, topology: Topology) -> None:
    norms = pool.run(compare, topology, ranks=range(topology.world_size))
    assert len(set(norms)) == 1
