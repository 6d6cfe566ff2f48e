"""Training on GPUs: replicas in DDP and fully_shard, layers sharded over a stage, loss scaling, eval.

Three or four ranks. On fewer GPUs they share them: see sharing.py.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sharing import my_device
from torch import nn
from torch.distributed.tensor import DTensor

import ldt
from ldt.testing import RankPool, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

sys.path.append(str(Path(__file__).parents[1] / "train"))
from checkpoint_jobs import WIDTH, Pair, Part, on_device, parts, spread

WORLD_SIZE = 4
BACKEND = "nccl"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def model_and_batch(
    topology: Topology, device: torch.device, seed: int = 1, dropout: float = 0.0
) -> tuple[list[Part], list[Pair]]:
    chunks = [part.to(device) for part in parts(topology, dropout=dropout)]
    return chunks, on_device(toy_microbatches(4, WIDTH, seed=seed), device)


def pipeline_of(
    topology: Topology, mesh: ldt.Mesh, chunks: Sequence[Part], way: str, **options: Any
) -> ldt.Pipeline:
    """Build a pipeline of copies; ``chunks`` stay the unsplit model. ``way`` shards the layers, or is "whole"."""
    copies = [copy.deepcopy(chunks[index]) for index in topology.chunks_of(mesh.stage)]
    mine = copies if way == "whole" else [spread(chunk, mesh, way) for chunk in copies]
    return ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None, **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_gradients(
    pipeline: ldt.Pipeline,
    references: Sequence[Sequence[nn.Module]],
    rtol: float,
    atol: float,
    times: int = 1,
) -> None:
    """Check that the gradients are ``times`` the mean of those of ``references``, unsplit models."""
    mesh, compared = pipeline.mesh, 0
    for index, chunk in zip(mesh.topology.chunks_of(mesh.stage), pipeline.chunks, strict=True):
        same = zip(*(reference[index].parameters() for reference in references), strict=True)
        for parameter, theirs in zip(chunk.parameters(), same, strict=True):
            grads = [other.grad for other in theirs if other.grad is not None]
            assert (parameter.grad is None) == (not grads)
            if parameter.grad is not None:
                expected = times * torch.stack(grads).mean(0)
                assert expected.abs().max() > 1e-3, "or the limits below allow anything"
                torch.testing.assert_close(whole(parameter.grad), expected, rtol=rtol, atol=atol)
                compared += 1
    assert compared >= 6


def replicas(way: str, edge_dp: int) -> None:
    """Run two steps, the second adding to the gradients of the first."""
    topology, device = Topology([1, 1], dp=2, edge_dp=edge_dp), my_device()
    made = [model_and_batch(topology, device, seed) for seed in range(edge_dp)]
    unsplit = [unsplit_step(chunks, batch, toy_loss) for chunks, batch in made]
    with ldt.connect(topology, BACKEND, device=device, ranks=range(topology.world_size)) as mesh:
        pipeline = pipeline_of(topology, mesh, made[0][0], way)
        for times in (1, 2):
            result = pipeline.step(made[mesh.replica][1] if mesh.is_edge else None)
            if mesh.is_edge:
                torch.testing.assert_close(result.losses, unsplit[mesh.replica][0], rtol=1e-5, atol=1e-6)
            check_gradients(pipeline, [model for _, model in unsplit], 1e-5, 1e-6, times)


@pytest.mark.parametrize(("way", "edge_dp"), [("ddp", 2), ("ddp", 1), ("fully_shard", 2), ("fully_shard", 1)])
def test_gradients_of_replicas_are_the_mean(pool: RankPool, way: str, edge_dp: int) -> None:
    pool.run(replicas, way, edge_dp, ranks=range(edge_dp + 2), timeout=120)


def sharded(tp: list[int]) -> None:
    """Layers sharded over the ranks of a stage, beside replicated ones."""
    topology, device = Topology(tp), my_device()
    chunks, batch = model_and_batch(topology, device)
    losses, reference = unsplit_step(chunks, batch, toy_loss)
    theirs = [parameter for chunk in reference for parameter in chunk.parameters()]
    with ldt.connect(topology, BACKEND, device=device, ranks=range(topology.world_size)) as mesh:
        pipeline = pipeline_of(topology, mesh, chunks, "plain")
        split = sum(isinstance(parameter, DTensor) for parameter in pipeline.parameters())
        assert (split > 0) == (mesh.tp_mesh.size() > 1)
        result = pipeline.step(batch if mesh.is_edge else None)
        if mesh.is_edge:
            torch.testing.assert_close(result.losses, losses, rtol=1e-4, atol=1e-5)
        check_gradients(pipeline, [reference], 1e-4, 1e-5)
        expected = nn.utils.clip_grad_norm_(theirs, 1e9)
        assert ldt.clip_grad_norm_(pipeline.parameters(), float(expected) / 2, mesh).item() == pytest.approx(
            expected.item(), rel=1e-5
        )
        nn.utils.clip_grad_norm_(theirs, float(expected) / 2)
        check_gradients(pipeline, [reference], 1e-4, 1e-5)


@pytest.mark.parametrize("tp", [[1, 2], [2, 1], [2, 2], [1, 3]], ids=str)
def test_layers_sharded_over_a_stage(pool: RankPool, tp: list[int]) -> None:
    pool.run(sharded, tp, ranks=range(sum(tp)), timeout=120)


def scaled(way: str) -> float:
    """Run three steps; every rank must skip the second, with an infinite gradient on one rank. Returns the scale."""
    topology, device = Topology([1, 2]), my_device()
    chunks, batch = model_and_batch(topology, device)
    with ldt.connect(topology, BACKEND, device=device, ranks=range(topology.world_size)) as mesh:
        scaler = ldt.GradScaler(mesh, init_scale=1024.0)
        pipeline = pipeline_of(topology, mesh, chunks, way, grad_scaler=scaler)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, foreach=False)
        for step in range(3):
            optimizer.zero_grad()
            pipeline.step(batch if mesh.is_edge else None)
            if step == 1 and mesh.tp_rank == 1:
                grad = next(p.grad for p in pipeline.parameters() if p.grad is not None)
                (grad.to_local() if isinstance(grad, DTensor) else grad)[0] = torch.inf
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        expected: Sequence[nn.Module] = chunks
        for _ in range(2):
            expected = stepped(expected, batch)
        for index, chunk in zip(topology.chunks_of(mesh.stage), pipeline.chunks, strict=True):
            for mine, theirs in zip(chunk.parameters(), expected[index].parameters(), strict=True):
                torch.testing.assert_close(whole(mine), theirs, rtol=1e-5, atol=1e-6)
        return scaler.get_scale()


def stepped(chunks: Sequence[nn.Module], batch: list[Pair]) -> list[nn.Module]:
    """Return the unsplit model after a step without scaling, since a power of two changes nothing."""
    _, model = unsplit_step(chunks, batch, toy_loss)
    optimizer = torch.optim.SGD(nn.ModuleList(model).parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    return model


@pytest.mark.parametrize("way", ["whole", "plain"])
def test_an_infinite_gradient_skips_the_step_on_all_ranks(pool: RankPool, way: str) -> None:
    assert pool.run(scaled, way, ranks=range(3), timeout=120) == [512.0] * 3


def evaluated(tp: list[int]) -> None:
    """Run a step with dropout, then eval without it, as a job validates between two steps, and a step again."""
    topology, device = Topology(tp), my_device()
    chunks, batch = model_and_batch(topology, device, dropout=0.5)
    with ldt.connect(topology, BACKEND, device=device, ranks=range(topology.world_size)) as mesh:
        pipeline = pipeline_of(topology, mesh, chunks, "plain")
        pipeline.step(batch if mesh.is_edge else None)
        outputs = {}
        for training in (False, True):
            for chunk in (*pipeline.chunks, *chunks):
                chunk.train(training)
            result = pipeline.eval([(inputs, None) for inputs, _ in batch] if mesh.is_edge else None)
            outputs[training] = result.outputs
        if not mesh.is_edge:
            return
        with torch.no_grad():
            model = nn.Sequential(*chunks).eval()
            expected = [model(inputs) for inputs, _ in batch]
        torch.testing.assert_close(outputs[False], expected, rtol=1e-4, atol=1e-5)
        again = outputs[True]
        assert again is not None
        assert not any(map(torch.allclose, again, expected)), "dropout is back"


@pytest.mark.parametrize("tp", [[1, 2], [2, 1]], ids=str)
def test_eval_between_steps(pool: RankPool, tp: list[int]) -> None:
    pool.run(evaluated, tp, ranks=range(3), timeout=120)
