"""Jobs for the ranks of tests of compression: steps and evals against the unsplit model that rounds alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pipeline_jobs import assert_equal_grads, assert_equal_losses, build
from torch import Tensor, nn

import ldt
from ldt.runtime.comm.compression import Compressions
from ldt.testing import toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.testing.rounding import with_rounding
from ldt.topology import Topology

WIDTH = 40  # rows that are no multiple of a block
Traffic = dict[str, tuple[int, int]]  # messages and bytes by channel


def reference_step(
    topology: Topology,
    chunks: Sequence[nn.Module],
    batches: Sequence[Any],
    choice: Any,
    loss_fn: Any = toy_loss,
) -> tuple[list[list[Tensor]], list[nn.Module]]:
    """The losses by edge replica, and the unsplit model with the mean of the replicas' gradients."""
    whole = with_rounding(topology, chunks, choice)
    losses, references = zip(*(unsplit_step(whole, batch, loss_fn) for batch in batches), strict=True)
    for models in zip(*references, strict=True):
        for of_all in zip(*(model.parameters() for model in models), strict=True):
            of_all[0].grad = sum(parameter.grad for parameter in of_all) / len(of_all)  # type: ignore[misc]
    return list(losses), references[0]


def compare_with_rounding(
    topology: Topology,
    choice: Any,
    number: int = 3,
    *,
    plan: Any = None,
    make: Callable[[Topology], list[nn.Module]] = lambda topology: toy_chunks(topology, WIDTH),
    loss_fn: Any = toy_loss,
    autocast: bool = False,
    **options: Any,
) -> Traffic:
    """Two steps, and an eval, against the unsplit model, bit for bit. Returns the traffic of the last step."""
    chunks = make(topology)
    batches = [toy_microbatches(number, WIDTH, batch=6, seed=seed) for seed in range(topology.edge_dp)]
    rounds = bool(Compressions.of(topology, choice, torch.device("cpu")).by_link)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        losses, reference = reference_step(topology, chunks, batches, choice, loss_fn)
        plain, _ = reference_step(topology, chunks, batches, "none", loss_fn)
    with ldt.connect(topology, compression=choice, ranks=range(topology.world_size), **options) as mesh:
        pipeline = build(mesh, chunks, loss_fn, plan=plan)
        given = batches[mesh.replica] if mesh.is_edge else None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            for _ in range(2):
                for chunk in chunks:
                    chunk.zero_grad()
                result = pipeline.step(given)
                if mesh.is_edge:
                    assert_equal_losses(result, losses[mesh.replica])
                    assert torch.equal(losses[mesh.replica][0], plain[mesh.replica][0]) != rounds
                assert_equal_grads(mesh, chunks, reference)
            traffic: Traffic = {name: tuple(counts) for name, counts in result.stats.channels.items()}  # type: ignore[misc]
            if plan is None:  # which is one for steps
                evaluated = pipeline.eval(given)
                if mesh.is_edge:
                    assert_equal_losses(evaluated, losses[mesh.replica])
                assert evaluated.stats.channels.items() <= result.stats.channels.items()
        return traffic
