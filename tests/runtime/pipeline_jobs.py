"""Jobs for the ranks of runtime tests: build a pipeline, run steps, compare with the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import ldt
import ldt.plan
from ldt.testing import toy_loss, unsplit_step
from ldt.topology import LanePolicy, Topology


def build(
    mesh: ldt.Mesh, chunks: Sequence[nn.Module], loss_fn: Callable[..., Any] | None = toy_loss, **options: Any
) -> ldt.Pipeline:
    """Return a pipeline with this rank's share of ``chunks``."""
    mine = [chunks[index] for index in mesh.topology.chunks_of(mesh.stage)]
    return ldt.Pipeline(mine, mesh, loss_fn=loss_fn if mesh.is_edge else None, **options)


def assert_equal_grads(mesh: ldt.Mesh, chunks: Sequence[nn.Module], reference: Sequence[nn.Module]) -> int:
    """Check that this rank's gradients equal ``reference``'s, bit for bit. Returns how many tensors were compared."""
    compared = 0
    for index in mesh.topology.chunks_of(mesh.stage):
        pairs = zip(chunks[index].named_parameters(), reference[index].parameters(), strict=True)
        for (name, mine), theirs in pairs:
            where = f"chunk {index}, {name}"
            assert (mine.grad is None) == (theirs.grad is None), f"{where}: {mine.grad} against {theirs.grad}"
            if mine.grad is not None:
                assert torch.equal(mine.grad, theirs.grad), f"{where}: {mine.grad} against {theirs.grad}"
                assert theirs.grad.abs().sum() > 0, f"{where}: a gradient of zeros proves nothing"
                compared += 1
    return compared


def assert_equal_losses(result: ldt.StepResult, losses: Sequence[torch.Tensor]) -> None:
    assert result.losses is not None
    assert len(result.losses) == len(losses)
    for index, (mine, theirs) in enumerate(zip(result.losses, losses, strict=True)):
        assert torch.equal(mine, theirs), f"microbatch {index}: {mine} against {theirs}"


def step_and_compare(
    mesh: ldt.Mesh,
    pipeline: ldt.Pipeline,
    chunks: Sequence[nn.Module],
    microbatches: Sequence[tuple[Any, Any]],
    loss_fn: Callable[..., Any] = toy_loss,
) -> ldt.StepResult:
    """Run a step from zero gradients and check that losses and gradients equal the unsplit model's, bit for bit."""
    for chunk in chunks:
        chunk.zero_grad()
    losses, reference = unsplit_step(chunks, copy.deepcopy(list(microbatches)), loss_fn)
    result = pipeline.step(microbatches if mesh.is_edge else None)
    if mesh.is_edge:
        assert_equal_losses(result, losses)
    else:
        assert result.loss is None
    assert_equal_grads(mesh, chunks, reference)
    return result


def job(
    topology: Topology,
    make: Callable[[], tuple[Sequence[nn.Module], Sequence[tuple[Any, Any]]]],
    loss_fn: Callable[..., Any] = toy_loss,
    policy: LanePolicy = "dedicated",
    **options: Any,
) -> None:
    """Connect the first ranks of the world, run two steps, compare both. ``make`` returns chunks and microbatches."""
    chunks, microbatches = make()
    with ldt.connect(topology, lanes=policy, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks, loss_fn, **options)
        for _ in range(2):
            step_and_compare(mesh, pipeline, chunks, microbatches, loss_fn)
