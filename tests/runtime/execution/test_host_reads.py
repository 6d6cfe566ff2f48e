"""Counts how often a step reads from the device: each read waits for all work queued there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_jobs import build
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ldt
from ldt.runtime.execution.grad_reduce import GradReduction
from ldt.runtime.execution.loss import StepLoss
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 2


class Reads(TorchDispatchMode):
    """Counts conversions of tensors to numbers, and calls of tolist."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.number = 0
        tolist = Tensor.tolist

        def counted(tensor: Tensor) -> Any:
            self.number += 1
            return tolist(tensor)

        monkeypatch.setattr(Tensor, "tolist", counted)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_counts_of_tokens_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = torch.randn(16, 8)
    loss = StepLoss(lambda x, y: (x.sum(), torch.tensor(y)), "token", 16)
    with Reads(monkeypatch) as reads:
        for index, output in enumerate(outputs):
            loss.forward(index, output, index + 1)
        assert reads.number == 0
        assert loss.count == sum(range(1, 17))
        losses, total = loss.per_microbatch(), loss.total()
        assert reads.number == 1
    assert torch.equal(torch.stack(losses), outputs.sum(1) / torch.arange(1, 17))
    torch.testing.assert_close(total, outputs.sum() / 136)


def test_counts_may_be_numbers_too() -> None:
    counts: list[Any] = [2, 3.5, torch.tensor(4), torch.tensor([5.0])]
    loss = StepLoss(lambda x, y: (x, y), "token", 4)
    for index, count in enumerate(counts):
        loss.forward(index, torch.ones(()), count)
    assert loss.count == 14.5
    assert [value.item() for value in loss.per_microbatch()] == pytest.approx([1 / 2, 1 / 3.5, 1 / 4, 1 / 5])
    with pytest.raises(ValueError, match="number of tokens as a number or a tensor of one, got str"):
        loss.forward(0, torch.ones(()), "6")


def test_the_norm_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology([1], laps=2)
    with ldt.connect(topology) as mesh:
        pipeline = build(mesh, toy_chunks(topology))
        pipeline.step(toy_microbatches(2))
        expected = torch.nn.utils.get_total_norm(
            [p.grad for p in pipeline.parameters() if p.grad is not None]
        )
        with Reads(monkeypatch) as reads:
            norm = ldt.clip_grad_norm_(pipeline.parameters(), 1e-3, mesh)
        # One more read on the host: the sum from the control plane.
        assert reads.number <= 3
        torch.testing.assert_close(norm, expected)


class Partly(ToyChunk):
    """Uses its second layer on rank 0 only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if dist.get_rank() == 0 else x + self.norm(self.first(x))


def reduced(whole: bool) -> tuple[int, list[bool]]:
    topology = Topology([1], dp=2)
    torch.manual_seed(0)
    chunks = [ToyChunk(16), ToyChunk(16) if whole else Partly(16)]
    chunks[1].unused = torch.nn.Parameter(torch.zeros(3), requires_grad=not whole)  # type: ignore[assignment]
    with ldt.connect(topology) as mesh, pytest.MonkeyPatch.context() as patch:
        pipeline = build(mesh, chunks, toy_loss)
        number = 0

        def counting(method: Any) -> Any:
            def counted(*arguments: Any) -> None:
                nonlocal number
                with pytest.MonkeyPatch.context() as inner, Reads(inner) as reads:
                    method(*arguments)
                number += reads.number

            return counted

        for name in ("__init__", "finish"):
            patch.setattr(GradReduction, name, counting(getattr(GradReduction, name)))
        pipeline.step(toy_microbatches(2))
        grads = [p.grad is not None for p in chunks[1].second.parameters()]
        assert chunks[1].unused.grad is None
        return number, grads


def test_a_reduction_reads_only_where_a_gradient_is_missing(pool: RankPool) -> None:
    assert pool.run(reduced, True) == [(0, [True, True])] * 2
    assert pool.run(reduced, False) == [(1, [True, True])] * 2, (
        "a gradient of one replica becomes one of both"
    )


class Masked(ToyChunk):
    """Takes a mask and positions by name, and grids, on whose values shapes may depend."""

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
    ) -> Tensor:
        assert attention_mask is not None
        assert position_ids is not None
        return super().forward(x) * attention_mask.float().sum() + position_ids.float().mean()


def masked_steps() -> list[int]:
    """Return the reads of each step of ragged microbatches with metadata."""
    topology = Topology([1, 1])
    lengths = [3, 7, 5, 2]
    with ldt.connect(topology) as mesh, pytest.MonkeyPatch.context() as patch:
        pipeline = build(mesh, [Masked(16), Masked(16), Masked(16)], toy_loss)
        numbers = []
        for seed in range(3):
            batch = []
            for x, y in toy_microbatches(4, seed=seed):
                mask = torch.ones(4, lengths[len(batch)], dtype=torch.int64)
                mask[:, : seed % 2] = 0
                inputs = {"x": x, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1}
                batch.append((inputs | {"image_grid_thw": torch.tensor([[1, 2, 4]])}, y))
            with Reads(patch) as reads:
                pipeline.step(batch if mesh.is_edge else None)
            numbers.append(reads.number)
        return numbers


def test_metadata_are_read_once_for_a_step(pool: RankPool) -> None:
    """The host reads no element of a mask, of positions or of grids one by one, however many there are."""
    for numbers in pool.run(masked_steps):
        assert numbers == [0] * 3
