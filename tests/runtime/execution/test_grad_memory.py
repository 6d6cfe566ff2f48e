"""Parameters whose gradients share memory: an in-place change is applied to each of them once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn

import ldt
from ldt.testing import RankPool
from ldt.testing.late_sends import each_kind_at_once
from ldt.topology import Topology

WORLD_SIZE = 2


class Sums(nn.Module):
    """Sums parameters whose gradients are views of one tensor: whole, overlapping, and sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.whole, self.upper, self.lower = (nn.Parameter(torch.randn(rows, 4)) for rows in (4, 3, 3))
        self.first, self.second = nn.Embedding(5, 4, sparse=True), nn.Embedding(5, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens, row = torch.arange(4), x.new_zeros(1, 4)
        y: Tensor = self.linear(x)
        for term in (
            self.whole,
            torch.cat([self.upper, row]),
            torch.cat([row, self.lower]),
            self.first(tokens),
            self.second(tokens),
        ):
            y = y + term.unsqueeze(0)
        return y


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output * target).square().sum(), 3


def mean(output: Tensor, target: Tensor) -> Tensor:
    return sum_and_count(output, target)[0] / 3


def expected(chunks: list[nn.Module], batch: list[Any]) -> list[nn.Module]:
    """Run one backward for all microbatches: its gradients may share memory, but are summed correctly."""
    model = copy.deepcopy(nn.Sequential(*chunks))
    torch.stack([mean(model(x), y) for x, y in batch]).mean().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
    return list(model)


def changed_once(way: str, dp: int, split: bool) -> None:
    torch.manual_seed(0)
    topology = Topology([1] if dp > 1 else [1, 1], dp=dp)
    chunks: list[nn.Module] = [Sums() for _ in range(topology.num_chunks)]
    if dp > 1 or way == "clipped":  # replicas do not support sparse gradients, nor does torch's own norm
        for module in nn.ModuleList(chunks).modules():
            if isinstance(module, nn.Embedding):
                module.sparse = False
    batch = [(torch.randn(1, 4, 4), torch.randn(1, 4, 4)) for _ in range(2 * dp)]
    reference = expected(chunks, batch)
    with ldt.connect(topology) as mesh:
        scaler = ldt.GradScaler(mesh, init_scale=1024.0) if way == "scaled" else None
        loss_fn, reduction = (sum_and_count, "token") if way == "token" else (mean, "mean")
        pipeline = build(
            mesh,
            chunks,
            loss_fn,
            plan=each_kind_at_once(topology, 2, True) if split else None,
            loss_reduction=reduction,
            grad_scaler=scaler,
        )
        pipeline.step(batch[2 * mesh.replica :][:2] if mesh.is_edge else None)
        if scaler is not None:
            scaler.unscale_(torch.optim.SGD(pipeline.parameters(), lr=0.1))
        if way == "clipped":
            norm = nn.utils.clip_grad_norm_(nn.ModuleList(reference).parameters(), 1.0)
            found = ldt.clip_grad_norm_(pipeline.parameters(), 1.0, mesh)
            torch.testing.assert_close(found, norm)
        for index in topology.chunks_of(mesh.stage):
            compare(chunks[index], reference[index], way)


def compare(chunk: nn.Module, reference: nn.Module, way: str) -> None:
    for (name, mine), theirs in zip(chunk.named_parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(
            mine.grad.to_dense(), theirs.grad.to_dense(), msg=lambda text, name=name: f"{way}, {name}: {text}"
        )


@pytest.mark.parametrize(
    ("way", "dp", "split"),
    [
        ("token", 1, False),
        ("token", 1, True),
        ("token", 2, False),
        ("clipped", 1, False),
        ("scaled", 1, False),
    ],
)
def test_what_is_done_to_gradients_is_done_once(pool: RankPool, way: str, dp: int, split: bool) -> None:
    pool.run(changed_once, way, dp, split)
