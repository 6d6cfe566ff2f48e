"""Metrics that a loss function returns, and outputs that a step keeps: those of the unsplit model."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn

import ldt
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
TOPOLOGY = Topology([1, 1, 1])
Parts = tuple[Any, ...]


def error(output: Tensor, target: Tensor) -> dict[str, Any]:
    """Metrics of each kind: a scalar that would keep the graph, a row for each sample, a number, one now and then."""
    found = {"largest": (output - target).abs().max(), "rows": output.sum(1).argmax(), "samples": len(output)}
    return found | ({"first": output[0]} if len(output) > 4 else {})


def mean_loss(output: Tensor, target: Tensor) -> Parts:
    return toy_loss(output, target), error(output, target)


def token_loss(output: Tensor, target: Tensor) -> Parts:
    return (output - target).square().sum(), output.numel(), error(output, target)


def graphs() -> int:
    gc.collect()
    return sum(isinstance(found, Tensor) and found.grad_fn is not None for found in gc.get_objects())


def compare(mode: str, reduction: Any) -> None:
    chunks = toy_chunks(TOPOLOGY)
    batch = [*toy_microbatches(2), *toy_microbatches(2, batch=6)]
    loss_fn = mean_loss if reduction == "mean" else token_loss
    with torch.no_grad():
        outputs = [nn.Sequential(*chunks)(x) for x, _ in batch]
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks, loss_fn=loss_fn, loss_reduction=reduction)
        given = batch if mesh.is_edge else None
        if mode == "step":
            assert pipeline.step(given).outputs is None
            result = pipeline.step(given, keep_outputs=True)
        else:
            assert pipeline.eval(given, keep_outputs=False).outputs is None
            result = pipeline.eval(given)
        if not mesh.is_edge:
            assert (result.metrics, result.outputs) == ({}, None)
            return
        assert graphs() == 0
        assert result.outputs is not None
        assert all(map(torch.equal, result.outputs, outputs))
        expected = [error(output, target) for output, (_, target) in zip(outputs, batch, strict=True)]
        assert result.metrics.keys() == {"largest", "rows", "samples", "first"}
        for name, values in result.metrics.items():
            wanted = [torch.as_tensor(found[name]) for found in expected if name in found]
            assert len(values) == len(wanted)
            assert all(map(torch.equal, values, wanted)), name


@pytest.mark.parametrize("reduction", ["mean", "token"])
@pytest.mark.parametrize("mode", ["step", "eval"])
def test_metrics_and_outputs_are_those_of_the_unsplit_model(
    pool: RankPool, mode: str, reduction: str
) -> None:
    pool.run(compare, mode, reduction)


def wrong(metrics: Any) -> str:
    chunks = toy_chunks(TOPOLOGY)
    mesh = ldt.connect(TOPOLOGY)
    pipeline = build(mesh, chunks, loss_fn=lambda output, target: (toy_loss(output, target), metrics))
    try:
        pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
    except ldt.LdtError as caught:
        return str(caught)
    finally:
        mesh.close()
    return ""


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({3: 1.0}, "loss_fn must name its metrics by strings, got int"),
        ({"a": 1, "b": "good"}, "loss_fn must return tensors or numbers as metrics, got str as number 1"),
        ([1.0], "loss_fn must return a scalar tensor, got tuple"),
    ],
)
def test_wrong_metrics_are_named_on_all_ranks(pool: RankPool, metrics: Any, expected: str) -> None:
    for text in pool.run(wrong, metrics):
        assert expected in text
