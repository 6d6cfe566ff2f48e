"""Tests that mistakes of the caller raise one clear error on every rank before any data is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_jobs import build, step_and_compare
from torch import nn

import ldt
import ldt.plan
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
TOPOLOGY = Topology([1, 1, 1])


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# -- building the pipeline ---------------------------------------------------------------------------------------


def built_with(at: int, mistake: str) -> str:
    """Every rank builds its pipeline, rank ``at`` with a mistake. Then all build a correct one and step."""
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        modules: Any = [chunks[index] for index in TOPOLOGY.chunks_of(mesh.stage)]
        options: dict[str, Any] = {"plan": ldt.plan.ushape(TOPOLOGY, 4)}
        if mesh.rank == at:
            if mistake == "too few chunks":
                modules = modules[:-1]
            elif mistake == "too many chunks":
                modules = [*modules, nn.Identity()]
            elif mistake == "not a module":
                modules = [lambda x: x] * len(modules)
            elif mistake == "a module, no list":
                modules = modules[0]
            elif mistake == "another topology's plan":
                options["plan"] = ldt.plan.ushape(Topology([1, 1, 1], laps=2), 4)
            elif mistake == "other lanes' plan":
                options["plan"] = ldt.plan.ushape(TOPOLOGY, 4, lanes="paired")
            elif mistake == "another plan":
                options["plan"] = ldt.plan.ushape(TOPOLOGY, 5)
            elif mistake == "no plan at all":
                del options["plan"]
            elif mistake == "reduction":
                options["loss_reduction"] = "product"
        with pytest.raises((ValueError, TypeError, ldt.LdtError)) as caught:
            ldt.Pipeline(modules, mesh, loss_fn=toy_loss, **options)
        step_and_compare(mesh, build(mesh, chunks), chunks, toy_microbatches(2))
        return describe(caught.value)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("too few chunks", "got {fewer} modules"),
        ("too many chunks", "got {more} modules"),
        ("not a module", "must be a torch.nn.Module, got function"),
        ("a module, no list", "chunks must be a list of modules, got one ToyChunk: write [module]"),
        ("another topology's plan", "the plan is for topology tp=1,1,1 dp=1 edge_dp=1 laps=2, the mesh"),
        (
            "other lanes' plan",
            "the plan is for 'paired' lanes, the mesh was connected with lanes='dedicated'",
        ),
        ("reduction", "loss_reduction must be 'mean', 'sum', 'token' or 'root', got 'product'"),
    ],
)
def test_wrong_arguments_of_pipeline(pool: RankPool, mistake: str, text: str, at: int) -> None:
    answers = pool.run(built_with, at, mistake)
    number = len(TOPOLOGY.chunks_of(at))
    for rank, answer in enumerate(answers):
        assert text.format(fewer=number - 1, more=number + 1) in answer
        assert answer.startswith(f"RemoteStageError: rank {at} cannot begin Pipeline()") == (rank != at), (
            answer
        )


@pytest.mark.parametrize("mistake", ["another plan", "no plan at all"])
def test_ranks_with_different_plans(pool: RankPool, mistake: str) -> None:
    answers = pool.run(built_with, 1, mistake)
    assert "all ranks must be given equal plans: ranks [1] differ from this rank" in answers[0]
    assert "all ranks must be given equal plans: ranks [0, 2] differ from this rank" in answers[1]


# -- stepping ----------------------------------------------------------------------------------------------------

PAIRS = toy_microbatches(2)

EDGE_MISTAKES: dict[str, tuple[Any, str]] = {
    "none": (None, "ValueError: the edge needs microbatches"),
    "empty": ([], "ValueError: the list of microbatches is empty"),
    "empty generator": ("generator", "ValueError: the list of microbatches is empty"),
    "tensor": (
        torch.ones(2, 2),
        "TypeError: microbatches must be a list of (inputs, target) pairs, got Tensor",
    ),
    "number": (3, "TypeError: microbatches must be a list of (inputs, target) pairs, got int"),
    "bare inputs": (
        [PAIRS[0], PAIRS[0][0]],
        "TypeError: microbatch 1 must be a pair (inputs, target), got Tensor",
    ),
    "triple": (
        [(1, 2, 3)],
        "TypeError: microbatch 0 must be a pair (inputs, target), got tuple of 3 entries",
    ),
    "inputs": (
        [(1.0, None)],
        "TypeError: the inputs of microbatch 0 must be a tensor, a tuple or a dict, got float",
    ),
    "shape": ([(torch.ones(2, 5), None)], "cannot tell what chunk 0 (ToyChunk) returns for float32[2, 5]"),
}


def edge_mistake(name: str, mode: str) -> str:
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        given = EDGE_MISTAKES[name][0]
        if given == "generator":
            given = (pair for pair in [])  # type: ignore[var-annotated]
        with pytest.raises((ValueError, TypeError, ldt.LdtError)) as caught:
            getattr(pipeline, mode)(given if mesh.is_edge else None)
        step_and_compare(mesh, pipeline, chunks, toy_microbatches(2))  # the pipeline stays usable
        return describe(caught.value)


@pytest.mark.parametrize("mode", ["step", "eval"])
@pytest.mark.parametrize("name", sorted(EDGE_MISTAKES))
def test_bad_microbatches(pool: RankPool, name: str, mode: str) -> None:
    answers = pool.run(edge_mistake, name, mode)
    text = EDGE_MISTAKES[name][1]
    assert text in answers[0]
    for answer in answers[1:]:
        assert answer.startswith(f"RemoteStageError: rank 0, the edge, called {mode}() off: ")
        assert text in answer


def given_badly(at: list[int]) -> tuple[str, bool]:
    """Give bad microbatches to the edge ranks ``at``."""
    topology = Topology([2, 1])
    chunks = toy_chunks(topology)
    with ldt.connect(topology) as mesh:
        pipeline = build(mesh, chunks)
        given = [1, 2] if mesh.rank in at else PAIRS
        with pytest.raises((TypeError, ldt.LdtError)) as caught:
            pipeline.step(given if mesh.is_edge else None)
        if not mesh.failed:
            step_and_compare(mesh, pipeline, chunks, PAIRS)
        return describe(caught.value), mesh.failed


def test_bad_microbatches_on_an_edge_of_two_ranks(pool: RankPool) -> None:
    """If the leader refuses, all ranks do and the mesh stays usable. If only another rank does, the mesh fails."""
    own = "TypeError: microbatch 0 must be a pair"
    answers = pool.run(given_badly, [0, 1])
    assert [failed for _, failed in answers] == [False] * 3
    assert own in answers[0][0]
    assert own in answers[1][0]
    assert "called step() off" in answers[2][0]
    assert [failed for _, failed in pool.run(given_badly, [0])] == [False] * 3
    answers = pool.run(given_badly, [1])
    assert [failed for _, failed in answers] == [True] * 3
    assert own in answers[1][0]
    assert "rank 1 (stage 0, replica 0) failed first in the beginning of step()" in answers[0][0]


def no_loss() -> str:
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks, loss_fn=None)
        with pytest.raises((ValueError, ldt.RemoteStageError)) as caught:
            pipeline.step(PAIRS if mesh.is_edge else None)
        pipeline.eval(PAIRS if mesh.is_edge else None)
        return describe(caught.value)


def test_step_without_a_loss(pool: RankPool) -> None:
    answers = pool.run(no_loss)
    assert answers[0].startswith("InputValueError: step() needs a loss on the edge")
    assert all("step() needs a loss on the edge" in answer for answer in answers)


def called(calls: list[tuple[str, Any, bool]]) -> str:
    """Rank r makes ``calls[r]`` (method, microbatches, whether under inference_mode). All must raise."""
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        method, given, inference = calls[mesh.rank]
        with pytest.raises(Exception) as caught, torch.inference_mode(inference):  # noqa: PT011
            getattr(pipeline, method)(given)
        return describe(caught.value)


def test_microbatches_on_a_cloud_rank(pool: RankPool) -> None:
    answers = pool.run(called, [("step", PAIRS, False), ("step", PAIRS, False), ("step", None, False)])
    assert answers[1].startswith("InputValueError: microbatches were given on a rank of stage 1")
    assert all("RemoteStageError: rank 1 (stage 1" in answers[rank] for rank in (0, 2))
    assert all("only the edge, stage 0, has samples" in answer for answer in answers)


@pytest.mark.parametrize("where", [[0, 1, 2], [0], [2]])
def test_step_under_inference_mode(pool: RankPool, where: list[int]) -> None:
    answers = pool.run(called, [("step", None if rank else PAIRS, rank in where) for rank in range(3)])
    assert all("cannot run under torch.inference_mode()" in answer for answer in answers)


def good_after_bad() -> None:
    """The edge calls the step off, so the mesh stays usable, whichever ranks refused."""
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        with pytest.raises(ldt.LdtError), torch.inference_mode():
            pipeline.step(PAIRS if mesh.is_edge else None)
        pipeline.step(PAIRS if mesh.is_edge else None)


def test_a_good_step_after_one_under_inference_mode(pool: RankPool) -> None:
    pool.run(good_after_bad)


@pytest.mark.parametrize("modes", [("step", "step", "eval"), ("eval", "step", "eval")])
def test_ranks_that_make_different_calls(pool: RankPool, modes: tuple[str, ...]) -> None:
    answers = pool.run(called, [(mode, None if rank else PAIRS, False) for rank, mode in enumerate(modes)])
    assert all("every rank must make the same calls in the same order" in answer for answer in answers), (
        answers
    )


def edge_of_two(second: list[Any]) -> str:
    topology = Topology([2, 1])
    chunks = toy_chunks(topology)
    with ldt.connect(topology) as mesh:
        pipeline = build(mesh, chunks)
        with pytest.raises(ldt.LdtError) as caught:
            pipeline.step([PAIRS, second, None][mesh.rank])
        return describe(caught.value)


@pytest.mark.parametrize("second", [PAIRS[:1], toy_microbatches(2, batch=3)])
def test_ranks_of_the_edge_with_different_microbatches(pool: RankPool, second: list[Any]) -> None:
    answers = pool.run(edge_of_two, second)
    assert all("the ranks of the edge must have equal microbatches" in answer for answer in answers)


class Dictionary(ToyChunk):
    def forward(self, x: torch.Tensor) -> Any:
        return {"hidden": super().forward(x), "layers": [x]}


class TextInside(ToyChunk):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), "hidden"


def bad_output(kind: type[nn.Module]) -> str:
    topology = Topology([1, 1])
    chunks: list[nn.Module] = [ToyChunk(16), kind(16), ToyChunk(16)]
    with ldt.connect(topology, ranks=[0, 1]) as mesh:
        with pytest.raises(ldt.LdtError) as caught:
            build(mesh, chunks).step(PAIRS if mesh.is_edge else None)
        return describe(caught.value)


@pytest.mark.parametrize(
    ("kind", "got"), [(Dictionary, "dict of Tensor, list"), (TextInside, "tuple of Tensor, str")]
)
def test_outputs_that_are_not_tensors(pool: RankPool, kind: type[nn.Module], got: str) -> None:
    answers = pool.run(bad_output, kind, ranks=[0, 1])
    assert all(
        f"chunk 1 must return a tensor, or a tuple or a dict of tensors and None, got {got}" in answer
        for answer in answers
    )


def vector_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean(0)


def complex_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * 1j).sum()


def no_pair_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


def bad_loss(reduction: Any, loss_fn: Any) -> str:
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        with pytest.raises((ValueError, ldt.RemoteStageError)) as caught:
            build(mesh, chunks, loss_fn, loss_reduction=reduction).step(PAIRS if mesh.is_edge else None)
        return describe(caught.value)


@pytest.mark.parametrize(
    ("reduction", "loss_fn", "text"),
    [
        ("mean", vector_loss, "loss_fn must return a real scalar tensor, got a tensor of shape [16]"),
        ("mean", complex_loss, "a real scalar tensor, got a tensor of shape [] and torch.complex64"),
        ("token", no_pair_loss, "loss_fn must return (sum of losses, number of tokens), got Tensor"),
    ],
)
def test_wrong_returns_of_loss_fn(pool: RankPool, reduction: str, loss_fn: Any, text: str) -> None:
    assert all(text in answer for answer in pool.run(bad_loss, reduction, loss_fn))
