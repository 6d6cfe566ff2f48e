"""Stages of several GPUs and replicas over NCCL equal the unsplit model. Each needs three or four GPUs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ldt
from ldt.runtime.strands import Transfer
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import LanePolicy, Topology

GPUS = torch.cuda.device_count()
WORLD_SIZE = min(4, GPUS)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 3, reason="needs three GPUs")]

SHAPES = [
    ([1, 2], 1),
    ([2, 1], 1),
    ([1, 1, 1], 1),
    ([2, 2], 1),
    ([1, 3], 1),
    ([1, 1, 2], 1),
    ([2, 1, 1], 1),
    ([1, 1], 2),
]


def steps(
    tp: list[int], dp: int, laps: int, policy: LanePolicy, transfer: Transfer, dtype: torch.dtype
) -> None:
    topology = Topology(tp, dp=dp, laps=laps)
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    chunks = [chunk.to(device, dtype) for chunk in toy_chunks(topology, width=256)]
    batches = [
        [(x.to(device, dtype), y.to(device, dtype)) for x, y in toy_microbatches(6, width=256, seed=seed)]
        for seed in range(dp)
    ]
    references = [unsplit_step(chunks, copy.deepcopy(batch), toy_loss) for batch in batches]
    ranks = range(topology.world_size)
    with ldt.connect(topology, "nccl", policy, transfer=transfer, device=device, ranks=ranks) as mesh:
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None)
        for _ in range(2):
            for chunk in chunks:
                chunk.zero_grad()
            result = pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
            if mesh.is_edge:
                assert result.losses is not None
                assert all(map(torch.equal, result.losses, references[mesh.replica][0]))
            for index in topology.chunks_of(mesh.stage):
                check_gradients(chunks[index], [reference[index] for _, reference in references])


def check_gradients(chunk: nn.Module, references: list[nn.Module]) -> None:
    for parameter, *others in zip(chunk.parameters(), *(r.parameters() for r in references), strict=True):
        grads = [other.grad for other in others]
        expected = sum(grads[1:], grads[0]) / len(grads)  # type: ignore[arg-type, operator]
        assert parameter.grad is not None
        assert expected.abs().sum() > 0
        assert torch.equal(parameter.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tp", "dp"), SHAPES, ids=str)
def test_steps_equal_the_unsplit_model(pool: RankPool, tp: list[int], dp: int, dtype: torch.dtype) -> None:
    ranks = range(sum(tp) * dp)
    if len(ranks) > WORLD_SIZE:
        pytest.skip(f"needs {len(ranks)} GPUs")
    for laps, policy, transfer in (
        (1, "dedicated", "leader"),
        (2, "paired", "scatter"),
        (1, "dedicated", "direct"),
    ):
        pool.run(steps, tp, dp, laps, policy, transfer, dtype, ranks=ranks, timeout=120)
