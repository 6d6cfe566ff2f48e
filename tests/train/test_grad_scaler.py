"""Loss scaling over stages equals torch's on the unsplit model; an infinity on one stage skips the step on all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ldt
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
OPTIONS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}


def train_unsplit(
    chunks: list[nn.Module], batch: list[Any], bad: int | None
) -> tuple[list[nn.Module], float]:
    """Run four steps; in step ``bad`` a gradient of chunk 1 is infinite."""
    model = copy.deepcopy(nn.ModuleList(chunks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    for step in range(4):
        optimizer.zero_grad()
        for inputs, target in batch:
            scaler.scale(toy_loss(nn.Sequential(*model)(inputs), target) / len(batch)).backward()
        finish(step, bad, list(model)[1], optimizer, scaler)
    return list(model), scaler.get_scale()


def finish(step: int, bad: int | None, chunk: nn.Module | None, optimizer: Any, scaler: Any) -> None:
    if step == bad and chunk is not None:
        next(chunk.parameters()).grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def scaled(tp: list[int], frozen: bool, bad: int | None) -> float:
    topology = Topology(tp)
    chunks = toy_chunks(topology)
    if frozen:
        chunks[2].requires_grad_(False)  # stage 2 has no gradient at all
    batch = toy_microbatches(3)
    reference, expected = train_unsplit(chunks, batch, bad)
    with ldt.connect(topology) as mesh:
        scaler = ldt.GradScaler(mesh, **OPTIONS)
        pipeline = build(mesh, chunks, grad_scaler=scaler)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            result = pipeline.step(batch if mesh.is_edge else None)
            finish(step, bad, chunks[1] if mesh.stage == 1 else None, optimizer, scaler)
            assert result.loss is None or result.loss < 10, "the loss that is reported is not scaled"
        assert scaler.get_scale() == expected
        for index in topology.chunks_of(mesh.stage):
            for mine, theirs in zip(chunks[index].parameters(), reference[index].parameters(), strict=True):
                assert torch.equal(mine, theirs)
        return scaler.get_scale()


@pytest.mark.parametrize(("frozen", "bad"), [(False, None), (False, 1), (True, None), (True, 3)])
def test_steps_equal_those_of_one_process(pool: RankPool, frozen: bool, bad: int | None) -> None:
    scales = pool.run(scaled, [1, 1, 1], frozen, bad)
    assert len(set(scales)) == 1
    assert scales[0] == {None: 4096.0, 1: 1024.0, 3: 1024.0}[bad]


def test_ranks_of_a_stage_agree(pool: RankPool) -> None:
    assert len(set(pool.run(scaled, [1, 2], False, 1))) == 1


class PartlySplit(nn.Module):
    """Has one replicated layer, and two that are sharded over the ranks of the stage."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


def partly_split(bad: int | None) -> float:
    """In step ``bad``, the first rank's shard of a gradient is infinite."""
    topology = Topology([1, 2])
    chunks: list[nn.Module] = toy_chunks(topology)
    torch.manual_seed(1)
    chunks[1] = PartlySplit()
    batch = toy_microbatches(3)
    reference, expected = train_unsplit(chunks, batch, bad)
    with ldt.connect(topology) as mesh:
        if mesh.stage == 1:
            parallelize_module(chunks[1], mesh.tp_mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        scaler = ldt.GradScaler(mesh, **OPTIONS)
        pipeline = build(mesh, chunks, grad_scaler=scaler)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            pipeline.step(batch if mesh.is_edge else None)
            if step == bad and mesh.stage == 1 and mesh.tp_rank == 0:
                grad = chunks[1].up.weight.grad
                assert isinstance(grad, DTensor)
                grad.to_local()[0, 0] = torch.inf
            finish(step, None, None, optimizer, scaler)
        assert scaler.get_scale() == expected
        for index in topology.chunks_of(mesh.stage):
            for mine, theirs in zip(chunks[index].parameters(), reference[index].parameters(), strict=True):
                whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
                torch.testing.assert_close(whole, theirs)
        return scaler.get_scale()


@pytest.mark.parametrize("bad", [None, 1])
def test_layers_may_be_split_beside_some_that_are_not(pool: RankPool, bad: int | None) -> None:
    assert pool.run(partly_split, bad) == [{None: 4096.0, 1: 1024.0}[bad]] * 3


def of_torch() -> str:
    with ldt.connect(Topology([1, 1]), ranks=[0, 1]) as mesh:
        scaler = torch.amp.GradScaler("cpu") if mesh.is_edge else None
        with pytest.raises((TypeError, ldt.RemoteStageError)) as caught:
            build(mesh, toy_chunks(mesh.topology), grad_scaler=scaler)
        return str(caught.value)


def test_a_scaler_for_one_process_is_refused(pool: RankPool) -> None:
    for text in pool.run(of_torch, ranks=[0, 1]):
        assert "grad_scaler must be an ldt.GradScaler, got GradScaler: make ldt.GradScaler(mesh)" in text
