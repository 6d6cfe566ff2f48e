"""Tests steps that are announced while the previous step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_jobs import build, step_and_compare
from torch import Tensor

import ldt
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 4
Batch = list[tuple[Tensor, Tensor]]


def batches(replica: int = 0) -> list[Batch]:
    """Return microbatches of different shapes and numbers; the third list like the second."""
    return [
        toy_microbatches(number, batch=rows, seed=10 * replica + seed)
        for seed, (number, rows) in enumerate([(4, 3), (4, 5), (4, 5), (2, 1)])
    ]


def sum_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.shape[0]


def announced(tp: list[int], dp: int, edge_dp: int, reduction: Any) -> list[int]:
    """Announce all steps but the first. Returns how many messages the edge sent in each."""
    topology = Topology(tp, dp=dp, edge_dp=edge_dp)
    chunks = toy_chunks(topology)
    loss_fn: Callable[..., Any] = toy_loss if reduction == "mean" else sum_loss
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks, loss_fn, loss_reduction=reduction)
        expected = [run_alone(pipeline, mesh, batch) for batch in batches(mesh.replica)]
        sent = []
        steps = batches(mesh.replica)
        for number, batch in enumerate(steps):
            before = messages(mesh)
            upcoming = steps[number + 1] if number + 1 < len(steps) else None
            options = {"upcoming": upcoming} if mesh.is_edge else {}
            result = pipeline.step(batch if mesh.is_edge else None, **options)
            mesh.control.all_gather(None)
            sent.append(messages(mesh) - before)
            losses, grads = expected[number]
            assert [float(one) for one in result.losses or ()] == losses
            local = [p.grad for p in pipeline.parameters()]
            assert all(map(torch.equal, local, grads))
            clear(pipeline)
        return sent


def run_alone(pipeline: ldt.Pipeline, mesh: ldt.Mesh, batch: Batch) -> tuple[list[float], list[Tensor]]:
    result = pipeline.step(batch if mesh.is_edge else None)
    grads = [p.grad.clone() for p in pipeline.parameters() if p.grad is not None]
    clear(pipeline)
    return [float(one) for one in result.losses or ()], grads


def clear(pipeline: ldt.Pipeline) -> None:
    for parameter in pipeline.parameters():
        parameter.grad = None


def messages(mesh: ldt.Mesh) -> int:
    return sum(int(lane.stats()["sent_messages"]) for lane in mesh.edge_broadcast.lanes())


@pytest.mark.parametrize("reduction", ["mean", "token"])
@pytest.mark.parametrize(
    ("tp", "dp", "edge_dp"), [([1, 1, 1], 1, 1), ([2, 1], 1, 1), ([1, 1], 2, 1), ([1, 1], 2, 2)]
)
def test_an_announced_step_is_bit_equal(
    pool: RankPool, tp: list[int], dp: int, edge_dp: int, reduction: str
) -> None:
    """A step's message is sent during the previous step; with "token" each step also sends its number of tokens."""
    topology = Topology(tp, dp=dp, edge_dp=edge_dp)
    others = len(topology.nodes) - 1
    tokens = others if reduction == "token" else 0
    sent = pool.run(announced, tp, dp, edge_dp, reduction, ranks=range(topology.world_size))
    assert sent[0] == [2 * others + tokens, others + tokens, others + tokens, tokens]
    for rank in range(edge_dp * tp[0], topology.world_size):
        assert sent[rank] == [0] * 4


def mistaken(how: str) -> list[str]:
    """Return each rank's errors when a call differs from its announcement."""
    topology = Topology([1, 1])
    chunks = toy_chunks(topology)
    first, other, *_ = batches()
    errors = []
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks)
        upcoming: Any = "no list" if how == "bad" else other
        pipeline.step(*([first] if mesh.is_edge else []), **({"upcoming": upcoming} if mesh.is_edge else {}))
        if how == "refilled":
            other[0][0].copy_(other[1][0])
        if how == "mode":
            pipeline.chunks[0].eval()
        call = pipeline.eval if how == "eval" else pipeline.step
        given = {"batch": first, "bad": upcoming}.get(how, other)
        with pytest.raises((TypeError, ldt.LdtError)) as caught:
            call(given if mesh.is_edge else None)
        errors.append(str(caught.value))
        if how == "bad":  # refused before anything was sent: the mesh stays usable
            step_and_compare(mesh, pipeline, chunks, other)
    return errors


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("batch", "step() was announced (upcoming=) with other microbatches"),
        ("refilled", "or their tensors changed since"),
        ("eval", "announced"),
        ("mode", "autocast or the train mode of a module changed after step() was announced"),
        ("bad", "microbatches must be a list of (inputs, target) pairs, got str"),
    ],
)
def test_a_call_that_differs_from_its_announcement(pool: RankPool, how: str, sentence: str) -> None:
    for (text,) in pool.run(mistaken, how, ranks=range(2)):
        assert sentence in text


def same_objects() -> None:
    """Pass a new list with the same tensors."""
    topology = Topology([1, 1])
    chunks = toy_chunks(topology)
    first, other, *_ = batches()
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks)
        pipeline.step(first if mesh.is_edge else None, **({"upcoming": iter(other)} if mesh.is_edge else {}))
        losses, _ = unsplit_step(chunks, other, toy_loss)
        result = pipeline.step([(x, y) for x, y in other] if mesh.is_edge else None)
        assert all(map(torch.equal, result.losses or (), losses))


def test_a_new_list_of_the_same_tensors(pool: RankPool) -> None:
    pool.run(same_objects, ranks=range(2))
