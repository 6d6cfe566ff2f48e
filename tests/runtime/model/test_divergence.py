"""Tests that a plain tensor that differs between the ranks of a stage is refused if the link sends one rank's."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn

import ldt
from ldt.runtime.model.divergence import _distance, _sketch
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4


class _Add(torch.autograd.Function):
    """Adds to the gradient only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (1 + ctx.value), None


class Unlike(ToyChunk):
    """Changes the output or the input's gradient (``where``) on rank 1 of the stage after ``late`` calls."""

    def __init__(self, where: str, late: int = 0) -> None:
        super().__init__(16)
        self.where, self.late, self.calls, self.tp_rank = where, late, 0, 0
        self.noise = 0.0

    def forward(self, x: Tensor) -> Any:
        if type(x) is not Tensor:
            y = super().forward(x)
            return (y, y.detach().argmax(-1)) if self.where == "numbers" else y
        self.calls += 1
        unlike = self.tp_rank * (self.calls > self.late)
        if self.where == "gradient":
            x = _Add.apply(x, 0.5 * unlike)  # type: ignore[no-untyped-call]
        y = super().forward(x)
        if self.where == "output" and unlike:
            y = y.flip(0)
        if self.where == "noise":
            y = y * (1 + 1e-5 * self.tp_rank)
        if self.where == "not finite" and unlike:
            y = y * torch.nan
        return (y, y.detach().argmax(-1) + unlike) if self.where == "numbers" else y


class Last(ToyChunk):
    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return super().forward(x)


def stepping(tp: list[int], chunk: int, where: str, transfer: Any, evaluate: bool = False) -> str:
    """Return the error of a step, after a correct step with other shapes."""
    topology = Topology(tp)
    torch.manual_seed(0)
    chunks: list[nn.Module] = [Last(16) for _ in range(topology.num_chunks)]
    chunks[chunk] = Unlike(where, late=2)
    try:
        with ldt.connect(topology, ranks=range(sum(tp)), transfer=transfer) as mesh:
            chunks[chunk].tp_rank = mesh.tp_rank  # type: ignore[assignment]
            pipeline = build(mesh, chunks)
            run = pipeline.eval if evaluate else pipeline.step
            for batch in (toy_microbatches(2), toy_microbatches(2, batch=6)):
                run(batch if mesh.is_edge else None)
    except ldt.LdtError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("tp", "chunk", "where", "transfer"),
    [
        ([2, 2], 1, "output", "leader"),
        ([2, 2], 0, "output", "scatter"),
        ([1, 2], 1, "output", "direct"),
        ([1, 2], 1, "gradient", "leader"),
        ([2, 2], 1, "gradient", "scatter"),
        ([2, 1], 2, "gradient", "auto"),
        ([1, 2], 1, "numbers", "leader"),
        ([1, 2], 1, "not finite", "leader"),
    ],
)
def test_ranks_with_different_values_are_refused(
    pool: RankPool, tp: list[int], chunk: int, where: str, transfer: str
) -> None:
    what = "gradient of the input" if where == "gradient" else "output"
    index = 1 if where == "numbers" else 0
    stage = 0 if chunk in (0, 2) else 1
    first = 0 if stage == 0 else tp[0]
    for text in pool.run(stepping, tp, chunk, where, transfer, ranks=range(sum(tp))):
        assert (
            f"{what} of chunk {chunk} for microbatch 0, tensor {index}, differs between rank {first} and"
            in text
        )
        assert f"ranks [{first + 1}] of stage {stage}" in text
        assert 'transfer="direct"' in text


def test_evals_are_checked_too(pool: RankPool) -> None:
    for text in pool.run(stepping, [1, 2], 1, "output", "leader", True, ranks=range(3)):
        assert "output of chunk 1 for microbatch 0, tensor 0, differs" in text


@pytest.mark.parametrize(
    ("tp", "where", "transfer"), [([2, 2], "output", "direct"), ([1, 2], "noise", "leader")]
)
def test_what_may_differ(pool: RankPool, tp: list[int], where: str, transfer: str) -> None:
    """Ranks may hold different rows if each rank sends its own, and may differ by rounding."""
    assert pool.run(stepping, tp, 1, where, transfer, ranks=range(sum(tp))) == [""] * sum(tp)


class Failing(ToyChunk):
    def __init__(self) -> None:
        super().__init__(16)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and type(x) is Tensor:
            time.sleep(0.2)
            raise ValueError("on purpose")
        return super().forward(x)


def failing() -> str:
    """Fail on one rank while the others of its stage wait for its checksums."""
    topology = Topology([1, 2])
    chunks: list[nn.Module] = toy_chunks(topology)
    torch.manual_seed(7)
    chunks[1] = Failing()
    with ldt.connect(topology, ranks=range(3)) as mesh:
        chunks[1].fails = mesh.rank == 2  # type: ignore[assignment]
        with pytest.raises((ValueError, ldt.LdtError)) as caught:
            build(mesh, chunks).step(toy_microbatches(2) if mesh.is_edge else None)
        return str(caught.value)


def test_a_rank_that_fails_during_the_check(pool: RankPool) -> None:
    for text in pool.run(failing, ranks=range(3)):
        assert "on purpose" in text


def counting() -> int:
    """Count the checksum messages between the ranks of a node over several steps of two shapes."""
    topology = Topology([1, 2])
    with ldt.connect(topology, ranks=range(3)) as mesh:
        asked: list[str] = []
        original = mesh.control.all_gather_in_node
        mesh.control.all_gather_in_node = lambda numbers, what: (asked.append(what), original(numbers, what))[
            1
        ]  # type: ignore[method-assign]
        pipeline = build(mesh, toy_chunks(topology))
        for batch in (toy_microbatches(3), toy_microbatches(2, batch=6), toy_microbatches(3)):
            pipeline.step(batch if mesh.is_edge else None)
        return len(asked)


def test_each_kind_of_message_is_checked_once(pool: RankPool) -> None:
    assert pool.run(counting, ranks=range(3)) == [0, 4, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_a_sketch_estimates_the_distance_of_tensors(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    first, other = (torch.randn(300_000, generator=draw) for _ in range(2))
    base = _sketch(first.to(dtype))
    for share in (1.0, 0.3, 0.1):
        mixed = first + share * other
        assert _distance(base, _sketch(mixed.to(dtype))) == pytest.approx(share, rel=0.9)
    assert _distance(base, _sketch(first.to(dtype).roll(1 << 17))) > 0.5
    assert _distance(base, _sketch(first.to(dtype))) == 0
    assert _distance(_sketch(torch.zeros(4)), _sketch(torch.zeros(4))) == 0
