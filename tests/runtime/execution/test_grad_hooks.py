"""Hooks on parameter gradients work as in the unsplit model, or are refused by name if gradients change later."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from pipeline_jobs import assert_equal_grads, build
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

import ldt
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4


def clipping(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


def halved(grad: Tensor) -> Tensor:
    return grad.clamp(-1e-3, 1e-3)


def add_hook(chunk: nn.Module, kind: str) -> None:
    """Register a hook on its first weight."""
    assert isinstance(chunk, ToyChunk)
    weight = chunk.first.weight
    if kind == "accumulated":
        weight.register_post_accumulate_grad_hook(clipping)
    elif kind == "tensor":
        weight.register_hook(halved)  # type: ignore[no-untyped-call]
    else:
        _apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.1})


def sums(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return toy_loss(output, target) * 4, 4


def refused(kind: str, dp: int, chunk: int, late: bool) -> str:
    topology = Topology([1, 1], dp=dp)
    chunks = toy_chunks(topology)
    options: dict[str, Any] = {} if dp > 1 else {"loss_reduction": "token"}
    with ldt.connect(topology, ranks=range(2 * dp)) as mesh:
        if not late:
            add_hook(chunks[chunk], kind)
        try:
            pipeline = build(mesh, chunks, toy_loss if dp > 1 else sums, **options)
            add_hook(chunks[chunk], kind)
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        except (ValueError, ldt.LdtError) as error:
            text = str(error)
        else:
            return ""
        if not late:  # the mesh stays usable
            pipeline = build(mesh, toy_chunks(topology))
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        return text


@pytest.mark.parametrize(
    ("kind", "dp", "chunk", "late", "hook"),
    [
        ("accumulated", 1, 1, False, "clipping"),
        ("tensor", 1, 2, False, "halved"),
        ("optimizer", 1, 0, False, "an optimizer in the backward"),
        ("accumulated", 2, 1, False, "clipping"),
        ("accumulated", 1, 1, True, "clipping"),
        ("tensor", 2, 0, True, "halved"),
    ],
)
def test_hooks_that_would_see_other_values(
    pool: RankPool, kind: str, dp: int, chunk: int, late: bool, hook: str
) -> None:
    then = "reduced over replicas" if dp > 1 else "divided by the number of tokens"
    for text in pool.run(refused, kind, dp, chunk, late, ranks=range(2 * dp)):
        assert f"chunk {chunk}: first.weight has a hook on its gradient ({hook})" in text
        assert f"before gradients are {then}" in text


def as_unsplit() -> None:
    """With a mean, hooks see the same gradients as in the whole model: one microbatch's contribution each."""
    topology = Topology([1, 1])
    chunks, whole = toy_chunks(topology), toy_chunks(topology)
    batch = toy_microbatches(3)
    for chunk in (*chunks, *whole):
        add_hook(chunk, "tensor")
    for inputs, target in batch:
        (toy_loss(nn.Sequential(*whole)(inputs), target) / len(batch)).backward()
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline, given = build(mesh, chunks), batch if mesh.is_edge else None
        with mock.patch("ldt.runtime.execution.step_runner.check_hooks_and_layers") as looked:
            pipeline.step(given, upcoming=given)
        assert looked.call_count == 1, "they are looked for once in a step"
        assert assert_equal_grads(mesh, chunks, whole) > 0


def test_hooks_that_see_the_same(pool: RankPool) -> None:
    pool.run(as_unsplit, ranks=range(2))


def frozen() -> None:
    topology = Topology([1, 1])
    chunks = toy_chunks(topology)
    for chunk in chunks:
        add_hook(chunk, "tensor")
        chunk.requires_grad_(False)
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks, sums, loss_reduction="token")
        pipeline.step(toy_microbatches(2) if mesh.is_edge else None)


def test_hooks_of_frozen_parameters_never_run(pool: RankPool) -> None:
    pool.run(frozen, ranks=range(2))
