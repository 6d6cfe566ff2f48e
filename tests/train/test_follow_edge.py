"""The cloud takes from the edge what it does not decide itself: learning rates, autocast, the scale of gradients."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_follow import TOPOLOGY, connected, optimizer_of
from torch import nn

import ldt
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches

WORLD_SIZE = 3


# -- the learning rates of the edge ----------------------------------------------------------------------------


def by_groups(chunks: list[nn.Module], groups: int, own: bool) -> torch.optim.Optimizer:
    """One group of all parameters, or weights and biases; their rates are wrong where they are not ``own``."""
    weights = [parameter for chunk in chunks for parameter in chunk.parameters()]
    parts = [weights] if groups == 1 else [weights[::2], weights[1::2]]
    rates = [1e-2, 3e-2] if own else [5.0, 5.0]
    return torch.optim.AdamW([{"params": p, "lr": lr} for p, lr in zip(parts, rates, strict=False)])


def with_rates_of_the_edge(groups: int) -> None:
    topology = TOPOLOGY
    expected = toy_chunks(topology)
    reference = by_groups(expected, groups, own=True)
    halving = torch.optim.lr_scheduler.ExponentialLR(reference, 0.5)
    for step in range(4):
        for x, target in toy_microbatches(4, seed=step):
            (toy_loss(nn.Sequential(*expected)(x), target) / 4).backward()
        reference.step()
        halving.step()
        reference.zero_grad()
    mesh, pipeline, chunks, _ = connected(topology)
    with mesh:
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        optimizer = by_groups(mine, groups, own=mesh.is_edge)
        if not mesh.is_edge:
            ldt.follow(pipeline, optimizer, learning_rate="edge")
        else:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            with ldt.Leader(pipeline, optimizer, scheduler) as leader:
                for step in range(4):
                    leader.step(toy_microbatches(4, seed=step))
        for index in topology.chunks_of(mesh.stage):
            for got, wanted in zip(chunks[index].parameters(), expected[index].parameters(), strict=True):
                assert torch.equal(got, wanted)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_cloud_takes_the_learning_rates_of_the_edge(pool: RankPool, groups: int) -> None:
    pool.run(with_rates_of_the_edge, groups, ranks=range(3))


def refused_rates(how: str) -> str:
    mesh, pipeline, chunks, (optimizer, scheduler) = connected(TOPOLOGY)
    mine = [chunks[index] for index in TOPOLOGY.chunks_of(mesh.stage)]
    try:
        with mesh:
            if not mesh.is_edge:
                rate: Any = "theirs" if how == "an unknown choice" else "edge"
                schedules = scheduler if how == "a scheduler" else None
                ldt.follow(pipeline, optimizer, schedules, learning_rate=rate)
                return ""
            of_edge = None if how == "no optimizer" else by_groups(mine, 2, own=True)
            falling = None if of_edge is None else torch.optim.lr_scheduler.ExponentialLR(of_edge, 0.5)
            with ldt.Leader(pipeline, of_edge, falling) as leader:
                batches = [toy_microbatches(2, seed=step) for step in range(2)]
                leader.step(batches[0], upcoming=batches[1])
                leader.step(batches[1])
    except (ldt.LdtError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("a scheduler", "'edge' without a scheduler on this rank, got 'edge' and a scheduler"),
        ("an unknown choice", "learning_rate must be 'own', or 'edge' .* got 'theirs'"),
        ("no optimizer", "needs one learning rate of the edge's optimizer, .*; got 0"),
        ("other groups", "one for each of the 1 parameter groups of this rank's; got 2"),
    ],
)
def test_learning_rates_that_cannot_be_taken_are_refused(pool: RankPool, how: str, expected: str) -> None:
    for text in pool.run(refused_rates, how, ranks=range(3), timeout=60):
        assert re.search(expected, text), text


# -- autocast ----------------------------------------------------------------------------------------------------


def gradients_under(autocast: bool, batch: list[Any]) -> list[list[torch.Tensor]]:
    """The gradients of the unsplit model, by chunk."""
    chunks = toy_chunks(TOPOLOGY)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for x, target in batch:
            (toy_loss(nn.Sequential(*chunks)(x), target) / len(batch)).backward()
    return [
        [parameter.grad for parameter in chunk.parameters() if parameter.grad is not None] for chunk in chunks
    ]


def under_autocast() -> None:
    batch = toy_microbatches(4)
    lower, full = (gradients_under(autocast, batch) for autocast in (True, False))
    mesh, pipeline, chunks, (optimizer, _) = connected(TOPOLOGY)
    with mesh:
        if not mesh.is_edge:
            optimizer.zero_grad = lambda *_: None  # type: ignore[method-assign]  # to compare gradients
            ldt.follow(pipeline, optimizer)
        else:
            with ldt.Leader(pipeline, optimizer) as leader:
                with torch.autocast("cpu", torch.bfloat16):
                    leader.step(batch)
                    leader.eval(batch)
                leader.eval(batch)
        for index in () if mesh.is_edge else TOPOLOGY.chunks_of(mesh.stage):
            for got, wanted, other in zip(chunks[index].parameters(), lower[index], full[index], strict=True):
                assert got.grad is not None
                near, far = (float((got.grad - each).abs().max()) for each in (wanted, other))
                assert 10 * near < far


def test_the_cloud_computes_in_the_autocast_of_the_edge(pool: RankPool) -> None:
    pool.run(under_autocast, ranks=range(3))


# -- grad scaler -------------------------------------------------------------------------------------------------


def overflowing(chunks: list[nn.Module]) -> None:
    """Freeze chunk 1, and let the second backward of chunk 2 overflow."""
    for parameter in chunks[1].parameters():
        parameter.requires_grad_(False)
    calls = iter(range(100))
    last = list(chunks[2].parameters())[-1]
    last.register_hook(lambda grad: grad * float("inf") if next(calls) == 1 else grad)


def scaled(max_norm: float | None) -> None:
    options: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}
    expected = toy_chunks(TOPOLOGY)
    overflowing(expected)
    trained = [p for p in nn.ModuleList(expected).parameters() if p.requires_grad]
    reference, scaler = torch.optim.AdamW(trained, lr=1e-2), torch.amp.GradScaler("cpu", **options)
    batches = [toy_microbatches(1, seed=step) for step in range(4)]
    for ((x, target),) in batches:
        scaler.scale(toy_loss(nn.Sequential(*expected)(x), target)).backward()
        scaler.unscale_(reference)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(trained, max_norm)
        scaler.step(reference)
        scaler.update()
        reference.zero_grad()
    chunks = toy_chunks(TOPOLOGY)
    overflowing(chunks)
    with ldt.connect(TOPOLOGY, ranks=range(3)) as mesh:
        indices = TOPOLOGY.chunks_of(mesh.stage)
        of_rank = ldt.GradScaler(mesh, **options)
        pipeline = ldt.Pipeline(
            [chunks[index] for index in indices],
            mesh,
            loss_fn=toy_loss if mesh.is_edge else None,
            grad_scaler=of_rank if mesh.is_edge else None,
        )
        mine = [parameter for parameter in pipeline.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(mine, lr=1e-2) if mine else None
        if mesh.is_edge:
            with ldt.Leader(pipeline, optimizer, scaler=of_rank) as leader:
                for batch in batches:
                    leader.step(batch, max_norm=max_norm)
        else:
            ldt.follow(pipeline, optimizer, scaler=of_rank)
        assert of_rank.get_scale() == scaler.get_scale()
        for index in indices:
            for got, wanted in zip(chunks[index].parameters(), expected[index].parameters(), strict=True):
                torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_scaled_steps_are_those_of_the_unsplit_model(pool: RankPool, max_norm: float | None) -> None:
    pool.run(scaled, max_norm, ranks=range(3))


def wrong_scaler(how: str) -> str:
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY, ranks=range(3)) as mesh:
        mine = [chunks[index] for index in TOPOLOGY.chunks_of(mesh.stage)]
        scaler = ldt.GradScaler(mesh)
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None, grad_scaler=scaler)
        optimizer, _ = optimizer_of(pipeline.parameters())
        other = torch.amp.GradScaler("cpu") if how == "torch" and not mesh.is_edge else scaler
        with pytest.raises(ldt.LdtError) as caught:
            (ldt.Leader if mesh.is_edge else ldt.follow)(
                pipeline, optimizer, scaler=None if how == "none" else other
            )
        return str(caught.value)


@pytest.mark.parametrize(
    ("how", "expected"), [("none", "the grad scaler of the pipeline"), ("torch", "must be an ldt.GradScaler")]
)
def test_wrong_grad_scalers_are_named_on_all_ranks(pool: RankPool, how: str, expected: str) -> None:
    for text in pool.run(wrong_scaler, how, ranks=range(3)):
        assert expected in text
