"""Tests validate(): the check of all stage boundaries on fake tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipeline_jobs import build, step_and_compare
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import ldt
from ldt.runtime import TensorSpec
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 5
Ragged = list[tuple[Tensor, Tensor]]


def ragged() -> Ragged:
    return [toy_microbatches(1, batch=rows, seed=rows)[0] for rows in (3, 5, 3)]


def valid(tp: list[int], laps: int) -> list[list[str]]:
    topology = Topology(tp, laps=laps)
    chunks = toy_chunks(topology)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks)
        hops = pipeline.validate(ragged() if mesh.is_edge else None)
        assert all(p.grad is None for p in pipeline.parameters())
        step_and_compare(mesh, pipeline, chunks, ragged())
        return [[", ".join(map(str, specs)) for specs in carried] for carried in hops]


@pytest.mark.parametrize(("tp", "laps"), [([1, 1, 1], 1), ([1, 2], 2), ([2], 1)])
def test_what_hops_will_carry(pool: RankPool, tp: list[int], laps: int) -> None:
    """Every rank gets the same specs, and the pipeline then runs as without the check."""
    topology = Topology(tp, laps=laps)
    crossing = [topology.crosses(hop) for hop in range(topology.tail)]
    expected = [
        [f"float32[{rows}, 16] with grad" if crosses else "" for crosses in crossing] for rows in (3, 5, 3)
    ]
    assert pool.run(valid, tp, laps, ranks=range(topology.world_size)) == [expected] * topology.world_size


class Declaring(ToyChunk):
    """Declares other specs than it returns."""

    def __init__(self, rows: int) -> None:
        super().__init__(16)
        self.rows = rows

    def output_spec(self, inputs: TensorSpec) -> TensorSpec:
        return TensorSpec((inputs.shape[0] + self.rows, 16), inputs.dtype, requires_grad=True)


class Reading(ToyChunk):
    """Cannot run without values, and declares what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if x.sum().item() < 1e9 else 0.0)

    def output_spec(self, inputs: TensorSpec) -> TensorSpec:
        return TensorSpec(inputs.shape, inputs.dtype, requires_grad=True)


def checked(kind: str) -> str:
    topology = Topology([1, 1, 1])
    chunks = toy_chunks(topology)
    chunks[1] = {
        "declares": Declaring(1),
        "right": Declaring(0),
        "reads": Reading(16),
        "width": ToyChunk(16),
    }[kind]
    if kind == "width":
        chunks[3] = nn.Linear(8, 8)
    with ldt.connect(topology, ranks=range(3)) as mesh:
        pipeline = build(mesh, chunks)
        try:
            pipeline.validate(ragged() if mesh.is_edge else None)
        except ldt.LdtError as error:
            return str(error)
        return "valid"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            "declares",
            "output of chunk 1 for microbatch 0 is not what it declares (output_spec): tensor 0 was agreed as "
            "float32[4, 16] with grad, got float32[3, 16] with grad",
        ),
        (
            "width",
            "chunk 3 does not accept its inputs for microbatch 0, float32[3, 16] with grad: RuntimeError",
        ),
        ("right", "valid"),
        ("reads", "valid"),
    ],
)
def test_a_boundary_that_does_not_match(pool: RankPool, kind: str, sentence: str) -> None:
    for text in pool.run(checked, kind, ranks=range(3)):
        assert sentence in text


class Forgetful(ToyChunk):
    """Does not declare that its output requires a gradient."""

    def __init__(self) -> None:
        super().__init__(16)

    def output_spec(self, inputs: TensorSpec) -> TensorSpec:
        return TensorSpec(inputs.shape, inputs.dtype)


def first_half(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output[..., :8]


def blamed(kind: str, validating: bool) -> str:
    topology = Topology([1, 1])
    chunks = toy_chunks(topology)
    if kind == "forgets":
        chunks[1] = Forgetful()
    else:
        chunks[0].register_forward_hook(first_half)
        chunks[1] = ToyChunk(8)
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks)
        call = pipeline.validate if validating else pipeline.step
        with pytest.raises(ldt.LdtError) as caught:
            call(ragged() if mesh.is_edge else None)
        return str(caught.value)


@pytest.mark.parametrize("validating", [False, True])
@pytest.mark.parametrize(
    ("kind", "sentences"),
    [
        (
            "forgets",
            (
                "output of chunk 1 for microbatch 0 is not what ",
                "tensor 0 requires a gradient, but the output_spec of the chunk says float32[3, 16]: return "
                "TensorSpec(..., requires_grad=True) there",
            ),
        ),
        (
            "hook",
            (
                "cannot tell what chunk 1 (ToyChunk) returns for float32[3, 16] with grad: RuntimeError: ",
                "Chunk 0 has a forward hook (first_half), which shape inference does not run: if it changes the inputs "
                "or outputs of that chunk, give the chunk a method output_spec",
            ),
        ),
    ],
)
def test_the_error_names_the_chunk_to_change(
    pool: RankPool, kind: str, sentences: tuple[str, ...], validating: bool
) -> None:
    for text in pool.run(blamed, kind, validating, ranks=range(2)):
        assert all(sentence in text for sentence in sentences), text
        assert "unfrozen" not in text


def refused() -> list[Any]:
    """Pass bad microbatches: refused as in a step, and the mesh stays usable."""
    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, toy_chunks(topology))
        with pytest.raises((TypeError, ldt.RemoteStageError), match="microbatches must be a list"):
            pipeline.validate(torch.ones(2) if mesh.is_edge else None)
        hops = pipeline.validate(ragged() if mesh.is_edge else None)
        return [str(specs) for carried in hops for (specs,) in carried]


def test_bad_microbatches_are_refused(pool: RankPool) -> None:
    assert pool.run(refused, ranks=range(2))[1][0] == "float32[3, 16] with grad"


def false_head() -> str:
    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, [Declaring(1), *toy_chunks(topology)[1:]])
        with pytest.raises(ldt.LdtError) as caught:
            pipeline.validate(ragged() if mesh.is_edge else None)
        return str(caught.value)


def test_the_head_is_checked_too(pool: RankPool) -> None:
    for text in pool.run(false_head, ranks=range(2)):
        assert "output of chunk 0 for microbatch 0 is not what it declares (output_spec)" in text


def for_eval_alone() -> list[str]:
    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, toy_chunks(topology), None)
        hops = pipeline.validate(ragged() if mesh.is_edge else None, training=False)
        pipeline.eval(ragged() if mesh.is_edge else None)
        return [str(specs) for (specs,) in hops[0]]


def test_a_pipeline_without_a_loss(pool: RankPool) -> None:
    assert pool.run(for_eval_alone, ranks=range(2)) == [["float32[3, 16]"] * 2] * 2


def sharded() -> None:
    """Validate chunks in fully_shard, which are skipped."""
    topology = Topology([1, 1], dp=2)
    chunks = [Declaring(0) for _ in range(3)]
    for number, chunk in enumerate(chunks):
        torch.manual_seed(number)
        for parameter in chunk.parameters():
            nn.init.normal_(parameter)
    with ldt.connect(topology, ranks=range(4)) as mesh:
        local = [copy.deepcopy(chunks[index]) for index in topology.chunks_of(mesh.stage)]
        for module in local:
            fully_shard(module, mesh=mesh.dp_mesh)
        pipeline = ldt.Pipeline(local, mesh, loss_fn=toy_loss)
        pipeline.validate(ragged() if mesh.is_edge else None)
        result = pipeline.step(ragged() if mesh.is_edge else None)
        if mesh.is_edge:
            losses, _ = unsplit_step(chunks, ragged(), toy_loss)
            torch.testing.assert_close(result.losses, losses)


def test_chunks_in_fully_shard_are_skipped(pool: RankPool) -> None:
    pool.run(sharded, ranks=range(4))
