"""Tests chunks in fully_shard and DistributedDataParallel: the gradients' mean, and one reduction per step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_jobs import build
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import ldt
from ldt.plan import Action, Costs, Kind, Plan, optimize, remove_communication, ushape
from ldt.runtime import TensorSpec
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Node, Topology

WORLD_SIZE = 4


class Declared(ToyChunk):
    def output_spec(self, inputs: TensorSpec) -> TensorSpec:
        return TensorSpec(inputs.shape, inputs.dtype, requires_grad=True)


class Reductions(TorchDispatchMode):
    """Counts collectives that reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += any(name in str(function) for name in ("reduce_scatter", "allreduce", "all_reduce"))
        return function(*args, **(kwargs or {}))


def wrapped(module: nn.Module, mesh: ldt.Mesh, wrapper: str) -> nn.Module:
    if mesh.dp_mesh.size() == 1 or wrapper == "plain":
        return module
    if wrapper == "ddp":
        return DistributedDataParallel(module, process_group=mesh.dp_mesh.get_group())
    fully_shard(module, mesh=mesh.dp_mesh)
    return module


def replicas(wrapper: str, edge_dp: int) -> int:
    topology = Topology([1, 1], dp=2, edge_dp=edge_dp)
    torch.manual_seed(0)
    chunks = [Declared(16) for _ in range(topology.num_chunks)]
    batches = [toy_microbatches(4, seed=seed) for seed in range(edge_dp)]
    unsplit = [unsplit_step(chunks, batch, toy_loss) for batch in batches]
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        local = [wrapped(copy.deepcopy(chunks[c]), mesh, wrapper) for c in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(local, mesh, loss_fn=toy_loss)
        for times in (1, 2):  # the second step adds to the first
            with Reductions() as reductions:
                pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
            for chunk, module in zip(topology.chunks_of(mesh.stage), local, strict=True):
                same = zip(*(reference[chunk].parameters() for _, reference in unsplit), strict=True)
                for parameter, references in zip(module.parameters(), same, strict=True):
                    grad = parameter.grad
                    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                    expected = times * sum(p.grad for p in references) / edge_dp  # type: ignore[misc]
                    torch.testing.assert_close(whole, expected, rtol=1e-6, atol=1e-6)
        return reductions.number


@pytest.mark.parametrize(
    ("wrapper", "edge_dp"),
    [("plain", 2), ("plain", 1), ("ddp", 2), ("ddp", 1), ("fully_shard", 2), ("fully_shard", 1)],
)
def test_one_reduction_for_each_chunk_and_step(pool: RankPool, wrapper: str, edge_dp: int) -> None:
    counts = pool.run(replicas, wrapper, edge_dp, ranks=range(edge_dp + 2))
    on_edge = 2 if edge_dp == 2 else 0  # head and tail
    assert counts == [on_edge] * edge_dp + [1, 1]


class TiedHead(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.linear = weight, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(x @ self.weight))  # type: ignore[no-any-return]


def tied(edge_dp: int) -> int:
    """Share one parameter between the first and the last chunk, with several edge replicas."""
    topology = Topology([1, 1], dp=2, edge_dp=edge_dp)
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 16) / 4)
    chunks = nn.ModuleList([TiedHead(weight), ToyChunk(16), TiedHead(weight)])
    batches = [toy_microbatches(4, seed=seed) for seed in range(edge_dp)]
    expected = [unsplit_step(chunks, batch, toy_loss)[1][0].weight.grad for batch in batches]  # type: ignore[arg-type]
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        local = [chunks[c] for c in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(local, mesh, loss_fn=toy_loss)
        with Reductions() as reductions:
            pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
        if mesh.is_edge:
            mean = sum(expected) / edge_dp  # type: ignore[arg-type]
            torch.testing.assert_close(weight.grad, mean, rtol=1e-6, atol=1e-6)
            assert len(list(pipeline.parameters())) == 1 + 2 * 2
        return reductions.number


@pytest.mark.parametrize("edge_dp", [2, 1])
def test_a_tied_weight_is_reduced_once(pool: RankPool, edge_dp: int) -> None:
    assert pool.run(tied, edge_dp, ranks=range(edge_dp + 2))[0] == (2 if edge_dp == 2 else 0)


def refused(tp: list[int], dp: int, edge_dp: int, plan: str) -> str:
    """Use fully_shard where it is not supported; every rank raises."""
    topology = Topology(tp, dp=dp, edge_dp=edge_dp)
    torch.manual_seed(0)
    chunks = [Declared(16) for _ in range(topology.num_chunks)]
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        local = [chunks[c] for c in topology.chunks_of(mesh.stage)]
        for chunk in local:
            fully_shard(chunk, mesh=mesh.dp_mesh if mesh.dp_mesh.size() > 1 else mesh.tp_mesh)
        made = None
        if plan == "split":
            made = optimize(topology, 3, Costs(1, 2, latency=1), split_backward=True)
        with pytest.raises((ValueError, ldt.LdtError)) as caught:  # noqa: PT012
            pipeline = ldt.Pipeline(local, mesh, made, loss_fn=toy_loss)
            pipeline.step(toy_microbatches(3) if mesh.is_edge else None)
        return str(caught.value)


@pytest.mark.parametrize(
    ("tp", "dp", "edge_dp", "plan", "sentence"),
    [
        ([1, 1], 2, 1, "", "equally often: node 1.1 has 2 such actions, node 1.0 4"),
        ([1, 2], 1, 1, "", "fully_shard must span the replicas"),
        ([1, 1], 2, 2, "split", "the backward of modules in fully_shard cannot be split"),
    ],
)
def test_unsupported_fully_shard_is_refused(
    pool: RankPool, tp: list[int], dp: int, edge_dp: int, plan: str, sentence: str
) -> None:
    size = Topology(tp, dp=dp, edge_dp=edge_dp).world_size
    for text in pool.run(refused, tp, dp, edge_dp, plan, ranks=range(size)):
        assert sentence in text


def undeclared() -> str:
    topology = Topology([1, 1], dp=2)
    with ldt.connect(topology) as mesh:
        torch.manual_seed(mesh.stage)
        local: list[nn.Module] = [ToyChunk(16) for _ in topology.chunks_of(mesh.stage)]
        for module in local:
            fully_shard(module, mesh=mesh.dp_mesh)
        pipeline = ldt.Pipeline(local, mesh, loss_fn=toy_loss)
        with pytest.raises(ldt.LdtError) as caught:
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        dist.barrier()
        return str(caught.value)


def test_sharded_chunks_must_declare_their_shapes(pool: RankPool) -> None:
    for text in pool.run(undeclared):
        assert "modules in fully_shard cannot run on fake tensors" in text
        assert "output_spec(*input_specs)" in text


def hand_written() -> str:
    """Replica 1 runs the forwards of two chunks in another order: valid for plain chunks, never for fully_shard."""
    topology = Topology([1, 1], dp=2, laps=2)
    plan = remove_communication(ushape(topology, 2))
    rows = {node: [a for a in row if a.kind is not Kind.REDUCE_GRAD] for node, row in plan.rows.items()}
    position = [action.kind for action in rows[Node(1, 1)]].index(Kind.B)
    rows[Node(1, 1)][:position] = [
        Action(1, Kind.F, 0),
        Action(3, Kind.F, 0),
        Action(1, Kind.F, 1),
        Action(3, Kind.F, 1),
    ]
    rows[Node(1, 0)][:position] = [
        Action(1, Kind.F, 0),
        Action(1, Kind.F, 1),
        Action(3, Kind.F, 0),
        Action(3, Kind.F, 1),
    ]
    other = Plan(topology, 2, {node: tuple(row) for node, row in rows.items()})
    torch.manual_seed(0)
    chunks = [Declared(16) for _ in range(topology.num_chunks)]
    with ldt.connect(topology) as mesh:
        local = [chunks[c] for c in topology.chunks_of(mesh.stage)]
        ldt.Pipeline(copy.deepcopy(local), mesh, other, loss_fn=toy_loss).step(
            toy_microbatches(2) if mesh.is_edge else None
        )
        for chunk in local[: 1 if mesh.stage else 0]:
            fully_shard(chunk, mesh=mesh.dp_mesh)
        with pytest.raises(ldt.PlanError) as caught:
            ldt.Pipeline(local, mesh, other, loss_fn=toy_loss)
        return str(caught.value)


def test_replicas_must_run_sharded_chunks_in_one_order(pool: RankPool) -> None:
    for text in pool.run(hand_written):
        assert "run its chunks, as layers in fully_shard gather them, in the same order: node 1.1 has" in text


class SparseTable(nn.Module):
    """Has a sparse gradient, from a layer or from a function."""

    def __init__(self, by_layer: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 16, sparse=by_layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(4)
        if self.table.sparse:
            return x + self.table(rows)  # type: ignore[no-any-return]
        return x + nn.functional.embedding(rows, self.table.weight, sparse=True)


def sparse_gradient_errors(chunk: int, by_layer: bool) -> list[str]:
    """Return the errors of Pipeline, of the first step after unfreezing the layer, and after it became dense."""
    topology = Topology([1, 1], dp=2)
    errors = []
    with ldt.connect(topology) as mesh:
        chunks = toy_chunks(topology)
        chunks[chunk] = SparseTable(by_layer)
        batch = toy_microbatches(3) if mesh.is_edge else None
        if by_layer:
            with pytest.raises(ldt.LdtError) as caught:
                build(mesh, chunks)
            errors.append(str(caught.value))
            chunks[chunk].table.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
        pipeline = build(mesh, chunks)
        if by_layer:
            pipeline.step(batch)
            chunks[chunk].table.weight.requires_grad_(True)  # type: ignore[union-attr, operator]
            pipeline.forget_shapes()
        with pytest.raises(ldt.LdtError) as caught:
            pipeline.step(batch)
        return [*errors, str(caught.value)]


@pytest.mark.parametrize(("chunk", "by_layer"), [(0, True), (1, True), (1, False)])
def test_sparse_gradients_are_refused_early(pool: RankPool, chunk: int, by_layer: bool) -> None:
    """Pipeline refuses them, or the first backward if only that shows them, but not the end of a step."""
    for errors in pool.run(sparse_gradient_errors, chunk, by_layer):
        for text in errors:
            assert "are sparse, which cannot be averaged over replicas" in text
        if by_layer:
            assert f"the gradients of table of chunk {chunk}" in errors[0]
        elif "failed first" in errors[-1]:
            assert f"failed first in action {chunk}B0 (" in errors[-1]
