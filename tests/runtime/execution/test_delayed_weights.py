"""Modules that delay the gradients of their weights: they run in W, or right after B, and before anything sees them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn

import ldt
from ldt.plan import Costs, optimize
from ldt.testing import RankPool, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 4
NUMBER = 4


class _Late(torch.autograd.Function):
    """A linear layer whose backward returns no gradient of the weight, but queues what computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: deque[Callable[[], None]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.queue = weight, queue
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        parameter = ctx.weight

        def late() -> None:
            of_weight = grad.t() @ x
            parameter.grad = of_weight if parameter.grad is None else parameter.grad + of_weight

        ctx.queue.append(late)
        return grad @ weight, None, None


class Late(nn.Module):
    """In the manner of ``name``: a method of the module, or a store that a builder flushes and pops."""

    def __init__(self, name: str, width: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.name = name
        self.queue: deque[Callable[[], None]] = deque()
        if name in ("backward_weight", "backward_dw"):
            setattr(self, name, self.run)

    def run(self) -> None:
        self.queue.popleft()()

    def forward(self, x: Tensor) -> Tensor:
        late: Tensor = _Late.apply(x, self.weight, self.queue)  # type: ignore[no-untyped-call]
        return late


class Plain(Late):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Block(nn.Module):
    """Two late layers among others. Its own method, if it has one, calls those of its parts."""

    def __init__(self, kind: type[Late], name: str) -> None:
        super().__init__()
        self.first, self.norm, self.second = kind(name), nn.LayerNorm(16), kind(name)
        if name == "dw_builder":
            self.dw_builder = self.built
        if name == "backward_dw":
            self.backward_dw = self.run

    def run(self) -> None:
        self.second.run()
        self.first.run()

    def built(self) -> Callable[[], None]:
        """As DualPipe's store: what was put since the last flush belongs together."""
        group = [layer.queue.popleft() for layer in (self.second, self.first)]

        def run() -> None:
            for late in group:
                late()

        return run

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.tanh(self.norm(self.first(x))))
        return x + hidden


def chunks_of(topology: Topology, kind: type[Late], name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(kind, name) for _ in range(topology.num_chunks)]


def compare(topology: Topology, name: str, split: bool) -> None:
    chunks = chunks_of(topology, Late, name)
    reference = chunks_of(topology, Plain, "")
    batches = [toy_microbatches(NUMBER, seed=seed) for seed in range(topology.edge_dp)]
    found = [unsplit_step(reference, batch, toy_loss) for batch in batches]
    plan = None
    if split:
        plan = optimize(topology, NUMBER, Costs(1.0, 2.0, weight=1.0), split_backward=True)
        assert any("W" in str(action) for row in plan.rows.values() for action in row)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks, plan=plan)
        for _ in range(2):
            for chunk in chunks:
                chunk.zero_grad()
            pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
        for index in topology.chunks_of(mesh.stage):
            mine: Any = chunks[index]
            assert not mine.first.queue
            assert not mine.second.queue
            references = [one[index].parameters() for _, one in found]
            for got, *wanted in zip(mine.parameters(), *references, strict=True):
                torch.testing.assert_close(got.grad, sum(one.grad for one in wanted) / len(wanted))


@pytest.mark.parametrize("name", ["backward_weight", "backward_dw", "dw_builder"])
@pytest.mark.parametrize("split", [False, True])
def test_gradients_are_those_of_the_unsplit_model(pool: RankPool, name: str, split: bool) -> None:
    pool.run(compare, Topology([1, 1, 1]), name, split, ranks=range(3))


@pytest.mark.parametrize("split", [False, True])
def test_before_they_are_reduced_over_replicas(pool: RankPool, split: bool) -> None:
    pool.run(compare, Topology([1, 1], dp=2), "backward_weight", split, ranks=range(4))


def test_before_they_are_divided_by_tokens(pool: RankPool) -> None:
    pool.run(tokens, ranks=range(2))


def token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), output.numel()


def tokens() -> None:
    topology = Topology([1, 1])
    chunks, reference = chunks_of(topology, Late, "backward_weight"), chunks_of(topology, Plain, "")
    batch = toy_microbatches(NUMBER)
    _, found = unsplit_step(reference, batch, toy_loss)
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks, loss_fn=token_loss, loss_reduction="token")
        pipeline.step(batch if mesh.is_edge else None)
        for index in topology.chunks_of(mesh.stage):
            for got, wanted in zip(chunks[index].parameters(), found[index].parameters(), strict=True):
                torch.testing.assert_close(got.grad, wanted.grad)
