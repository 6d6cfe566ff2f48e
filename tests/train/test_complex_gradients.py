"""Gradients of complex and other dtypes: norms, averages and loss scaling equal torch's on the unsplit model."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ldt
from ldt.testing import RankPool, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 4
WIDTH = 16


class Turned(nn.Module):
    """Multiplies by complex numbers; one of its two outputs is complex."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=dtype))
        self.scale = nn.Parameter(torch.randn(WIDTH, dtype=dtype.to_real()))
        self.empty = nn.Parameter(torch.zeros(0, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if y is None:
            y = torch.complex(x, x.flip(0))
        turned = y * self.turn + self.empty.sum()
        return x * self.scale + turned.real, turned


def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    loss: Tensor = (output[0] - target).square().mean() + output[1].abs().square().mean()
    return loss


def model(topology: Topology, dtype: torch.dtype) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Turned(dtype) for _ in range(topology.num_chunks)]


def clipped(dtype: torch.dtype, dp: int, norm_type: float, bad: float | None) -> float:
    topology = Topology([1, 1], dp=dp)
    chunks = model(topology, dtype)
    batches = [
        [(x.to(dtype.to_real()), y.to(dtype.to_real())) for x, y in toy_microbatches(2, WIDTH, seed=seed)]
        for seed in range(dp)
    ]
    _, reference = unsplit_step(chunks, [pair for batch in batches for pair in batch], loss_fn)
    if bad is not None:
        reference[1].turn.grad[3] = complex(0.0, bad)  # type: ignore[index, union-attr]
    whole = nn.ModuleList(reference)
    filled = [p for p in whole.parameters() if p.numel()]  # torch has no infinity norm of an empty tensor
    expected = nn.utils.clip_grad_norm_(filled, 0.1, norm_type)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=loss_fn)
        pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
        if bad is not None and mesh.stage == 1:
            chunks[1].turn.grad[3] = complex(0.0, bad)  # type: ignore[index, union-attr]
        norm = ldt.clip_grad_norm_(pipeline.parameters(), 0.1, mesh, norm_type)
        torch.testing.assert_close(norm, expected, equal_nan=True)
        for index in topology.chunks_of(mesh.stage):
            for mine_, theirs in zip(chunks[index].parameters(), reference[index].parameters(), strict=True):
                torch.testing.assert_close(mine_.grad, theirs.grad, equal_nan=True)
        return norm.item()


@pytest.mark.parametrize(
    ("dtype", "dp", "norm_type", "bad"),
    [
        (torch.complex64, 1, 2.0, None),
        (torch.complex128, 2, 2.0, None),
        (torch.complex64, 2, math.inf, None),
        (torch.complex64, 1, 3, None),
        (torch.complex64, 1, 1.0, math.nan),
        (torch.complex64, 1, math.inf, math.nan),
        (torch.complex64, 1, 2.0, math.inf),
    ],
)
def test_norms_and_averages(
    pool: RankPool, dtype: torch.dtype, dp: int, norm_type: float, bad: float | None
) -> None:
    pool.run(clipped, dtype, dp, norm_type, bad, ranks=range(2 * dp))


def scaled(bad: bool) -> None:
    """Complex gradients are unscaled, and checked for infinities."""
    topology = Topology([1, 1])
    chunks = model(topology, torch.complex64)
    batch = toy_microbatches(2, WIDTH)
    _, reference = unsplit_step(chunks, batch, loss_fn)
    with ldt.connect(topology, ranks=range(2)) as mesh:
        scaler = ldt.GradScaler(mesh, init_scale=64.0)
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=loss_fn, grad_scaler=scaler)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=1.0)
        before = copy.deepcopy(mine)
        pipeline.step(batch if mesh.is_edge else None)
        if bad and mesh.stage == 1:
            chunks[1].turn.grad = chunks[1].turn.grad.conj()  # type: ignore[union-attr]
            chunks[1].turn.grad[0] = complex(0, math.inf)  # type: ignore[index, union-attr]
        scaler.unscale_(optimizer)
        for index in () if bad else topology.chunks_of(mesh.stage):
            for parameter, theirs in zip(
                chunks[index].parameters(), reference[index].parameters(), strict=True
            ):
                torch.testing.assert_close(parameter.grad, theirs.grad)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (32.0 if bad else 64.0)
        assert torch.equal(before[0].turn, mine[0].turn) == bad  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [False, True])
def test_loss_scaling(pool: RankPool, bad: bool) -> None:
    pool.run(scaled, bad, ranks=range(2))


def of_dtype(kind: Any) -> list[float]:
    """Norms of gradients of other dtypes, on a mesh of one rank."""
    parameter = nn.Parameter(torch.zeros(4, 2))
    if kind == "sparse":
        indices = torch.tensor([[0, 3, 0]])
        grad = torch.sparse_coo_tensor(indices, torch.tensor([[3.0, 0], [0, 4.0], [2.0, 0]]), (4, 2))
        expected, parameter.grad = math.hypot(5, 4), grad
    else:
        values = torch.full((4, 2), 1.5).to(kind)
        parameter = nn.Parameter(torch.zeros(4, 2).to(kind), requires_grad=True)
        parameter.grad, expected = values, 1.5 * math.sqrt(8)
    with ldt.connect(Topology([1]), ranks=[0]) as mesh:
        norm = ldt.clip_grad_norm_([parameter], expected / 2, mesh).item()
        assert parameter.grad is not None
        again = ldt.clip_grad_norm_([parameter], 1e9, mesh).item()
        return [norm / expected, again / expected]


@pytest.mark.parametrize(
    "kind", ["sparse", torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex128], ids=str
)
def test_other_kinds(pool: RankPool, kind: Any) -> None:
    for norm, again in pool.run(of_dtype, kind, ranks=[0]):
        assert norm == pytest.approx(1.0, rel=1e-4)
        assert again == pytest.approx(0.5, rel=1e-2)


def refused() -> str:
    with ldt.connect(Topology([1]), ranks=[0]) as mesh, pytest.raises(ValueError, match="positive") as caught:
        ldt.clip_grad_norm_([], 1.0, mesh, norm_type=0)
    return str(caught.value)


def test_a_norm_that_is_none(pool: RankPool) -> None:
    assert "got 0.0" in pool.run(refused, ranks=[0])[0]
