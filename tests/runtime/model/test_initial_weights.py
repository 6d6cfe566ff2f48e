"""Tests that ranks that hold the same weights begin equal: compared by Pipeline, or broadcast from the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ldt
from ldt.runtime.model.digests import digests
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4


def changed(chunk: nn.Module, how: str) -> None:
    """Make one small difference."""
    with torch.no_grad():
        if how == "one value":
            chunk.second.weight[3, 5] += 2**-20  # type: ignore[index, operator, union-attr]
        elif how == "one bit of a buffer":
            chunk.register_buffer("seen", torch.tensor([True, False]))
        elif how == "frozen":
            chunk.second.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
        elif how == "dtype":
            chunk.second.double()  # type: ignore[operator, union-attr]
        elif how == "name":
            chunk.extra = nn.Parameter(torch.zeros(1))


def refused(tp: list[int], dp: int, where: int, how: str, **options: Any) -> str:
    """Return the error of ``Pipeline`` if rank ``where`` differs; the mesh stays usable."""
    topology = Topology(tp, dp=dp)
    chunks = toy_chunks(topology)
    for chunk in chunks:
        chunk.register_buffer("seen", torch.tensor([False, False]))
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        if mesh.rank == where:
            changed(chunks[mesh.topology.chunks_of(mesh.stage)[0]], how)
        with pytest.raises(ldt.LdtError) as caught:
            build(mesh, chunks, **options)
        same = toy_chunks(topology)
        build(mesh, same).step(toy_microbatches(2) if mesh.is_edge else None)
        return str(caught.value)


@pytest.mark.parametrize(
    ("tp", "dp", "where", "how", "names"),
    [
        ([1, 2], 1, 2, "one value", ["second.weight of chunk 1", "rank 1 and ranks [2] of stage 1"]),
        ([1, 1], 2, 3, "one value", ["second.weight of chunk 1", "rank 2 and ranks [3] of stage 1"]),
        ([1, 1], 2, 1, "one bit of a buffer", ["seen of chunk 0", "rank 0 and ranks [1] of stage 0"]),
        ([1, 2], 1, 1, "frozen", ["second.weight of chunk 1", "requires a gradient"]),
        ([2, 1], 1, 1, "dtype", ["second.weight of chunk 0", "float32[16, 16]", "float64[16, 16]"]),
        ([1, 2], 1, 2, "name", ["extra of chunk 1", "no tensor of this name", "float32[1]"]),
    ],
)
def test_ranks_with_different_initial_weights(
    pool: RankPool, tp: list[int], dp: int, where: int, how: str, names: list[str]
) -> None:
    texts = pool.run(refused, tp, dp, where, how, ranks=range(sum(tp) * dp))
    assert len(set(texts)) == 1
    for part in [*names, "sync_weights=True", "check_weights=False"]:
        assert part in texts[0]


def sending_refused() -> str:
    return refused([1, 2], 1, 2, "dtype", sync_weights=True)


def test_what_cannot_be_sent_is_refused(pool: RankPool) -> None:
    for text in pool.run(sending_refused, ranks=range(3)):
        assert "second.weight of chunk 1" in text


UNWRITABLE: dict[str, Callable[[], torch.Tensor]] = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "a torch.sparse_coo tensor": lambda: torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,)),
    "a torch.sparse_csr tensor": lambda: torch.eye(3).to_sparse_csr(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a tensor whose elements share memory": lambda: torch.ones(1).expand(4),
    "a tensor without values": lambda: torch.empty(3, device="meta"),
}


def unwritable(dp: int) -> None:
    """Give rank 1 an unwritable buffer: every rank raises, and the mesh stays usable."""
    topology = Topology([1, 1], dp=dp) if dp > 1 else Topology([2, 1])
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        for kind, make in UNWRITABLE.items():
            chunks = toy_chunks(topology)
            if mesh.rank == 1:
                chunks[0].register_buffer("odd", make())
            # Weights that are compared need values first.
            compared = dp > 1 and kind == "a tensor without values"
            text = "has no values yet" if compared else f"is {kind}.*which cannot be written by a broadcast"
            with pytest.raises(ldt.LdtError, match=f"odd of .* {text}"):
                build(mesh, chunks, sync_weights=dp == 1)
        build(mesh, toy_chunks(topology)).step(toy_microbatches(2) if mesh.is_edge else None)


@pytest.mark.parametrize("dp", [1, 2])
def test_values_that_cannot_be_written_are_refused(pool: RankPool, dp: int) -> None:
    """Both weights and buffers of replicas."""
    pool.run(unwritable, dp, ranks=range(2 * dp if dp > 1 else 3))


def sent(tp: list[int], dp: int, edge_dp: int) -> list[Any]:
    """Every rank draws its own weights, then takes those of the first rank of its stage."""
    topology = Topology(tp, dp=dp, edge_dp=edge_dp)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        chunks = toy_chunks(topology, seed=mesh.rank)
        for chunk in chunks:
            chunk.register_buffer("count", torch.tensor(mesh.rank))
            chunk.register_parameter("turned", nn.Parameter(torch.randn(3, 2).half().t()))
            if topology.tp[mesh.stage] > 1:
                local = torch.full((2,), float(mesh.rank))
                chunk.register_buffer("split", DTensor.from_local(local, mesh.tp_mesh, [Shard(0)]))
        build(mesh, chunks, sync_weights=True)
        first = topology.ranks_of_stage(mesh.stage)[0]
        expected = toy_chunks(topology, seed=first)
        for index in topology.chunks_of(mesh.stage):
            for name, parameter in expected[index].named_parameters():
                assert torch.equal(parameter, chunks[index].get_parameter(name)), name
            assert chunks[index].count == first  # type: ignore[union-attr]
            if topology.tp[mesh.stage] > 1:
                assert chunks[index].split.to_local().tolist() == [first + mesh.tp_rank] * 2  # type: ignore[operator, union-attr]
        return [digests([chunks[index].turned]) for index in topology.chunks_of(mesh.stage)]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("tp", "dp", "edge_dp"), [([1, 2], 1, 1), ([2, 1], 1, 1), ([1, 1], 2, 2), ([1, 1], 3, 1)]
)
def test_weights_of_the_first_rank_are_sent(pool: RankPool, tp: list[int], dp: int, edge_dp: int) -> None:
    topology = Topology(tp, dp=dp, edge_dp=edge_dp)
    answers = pool.run(sent, tp, dp, edge_dp, ranks=range(topology.world_size))
    for stage in range(2):
        ranks = topology.ranks_of_stage(stage)
        assert all(answers[rank] == answers[ranks[0]] for rank in ranks)


def split_over_ranks(sharding: str) -> None:
    """The parts of a sharded weight may differ."""
    topology = Topology([1, 3]) if sharding != "fully_shard" else Topology([1, 1], dp=2)
    chunks: Sequence[nn.Module] = toy_chunks(topology)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        local = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        for chunk in local:
            if sharding == "fully_shard":
                fully_shard(chunk, mesh=mesh.dp_mesh)
            elif sharding == "marked" and mesh.stage:
                mark(chunk, mesh.tp_rank)
            elif mesh.stage:
                parallelize_module(
                    chunk, mesh.tp_mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()}
                )
        ldt.Pipeline(local, mesh, loss_fn=toy_loss)


def mark(chunk: nn.Module, tp_rank: int) -> None:
    weight = chunk.first.weight  # type: ignore[union-attr]
    torch.nn.init.constant_(weight, tp_rank)  # type: ignore[arg-type]
    weight.tensor_model_parallel = True  # type: ignore[union-attr]


@pytest.mark.parametrize("sharding", ["tensor parallel", "fully_shard", "marked"])
def test_parts_of_a_sharded_weight_are_not_compared(pool: RankPool, sharding: str) -> None:
    pool.run(split_over_ranks, sharding)


def shards_of_replicas() -> str:
    """Give a DTensor different shards in two replicas."""
    topology = Topology([2], dp=2)
    chunks = toy_chunks(topology)
    with ldt.connect(topology) as mesh:
        local = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        for chunk in local:
            parallelize_module(chunk, mesh.tp_mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
        if mesh.rank == 3:
            local[0].first.weight.to_local().data[0, 0] += 1  # type: ignore[union-attr, operator]
        with pytest.raises(ldt.LdtError) as caught:
            ldt.Pipeline(local, mesh, loss_fn=toy_loss)
        return str(caught.value)


def test_shards_of_replicas_are_compared(pool: RankPool) -> None:
    for text in pool.run(shards_of_replicas):
        assert "first.weight of chunk 0 differs between rank 1 and ranks [3] of stage 0" in text


def without_values(make: str, **options: Any) -> str:
    topology = Topology([1, 2])
    chunks: list[nn.Module] = [ToyChunk(16), Lazy() if make == "lazy" else ToyChunk(16), ToyChunk(16)]
    if make == "meta":
        chunks[1].to("meta")
    if make == "nan":
        for parameter in chunks[1].parameters():
            nn.init.constant_(parameter, float("nan"))
    if make == "left out":
        torch.manual_seed(torch.distributed.get_rank())
        chunks[1] = ToyChunk(16)
    with ldt.connect(topology, ranks=range(3)) as mesh:
        try:
            build(mesh, chunks, **options)
        except ldt.LdtError as error:
            return str(error)
    return ""


def without_values_yet(make: str) -> str:
    return without_values(make, check_weights=False)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", ["lazy", "meta", "left out"])
def test_weights_that_are_loaded_later(pool: RankPool, make: str) -> None:
    assert pool.run(without_values_yet, make, ranks=range(3)) == [""] * 3
    for text in pool.run(without_values, make, ranks=range(3)):
        assert "must begin" in text
        assert make == "left out" or "weight of chunk 1 has no values yet" in text


def test_weights_with_nan(pool: RankPool) -> None:
    """NaNs of equal bits are equal."""
    assert pool.run(without_values, "nan", ranks=range(3)) == [""] * 3


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: torch.zeros(5, dtype=torch.bool), lambda t: t.logical_not_()),
        (lambda: torch.ones(3, 7).bfloat16(), lambda t: t[2, 6:].mul_(2)),
        (lambda: torch.ones(4, dtype=torch.complex64), lambda t: t[3:].imag.add_(1e-6)),
        (lambda: torch.ones(3).to(torch.float8_e4m3fn), lambda t: t[2:].copy_(torch.zeros(1))),
        (lambda: torch.tensor(1.5), lambda t: t.neg_()),
        (lambda: torch.eye(3).to_sparse_csr(), lambda t: t.values().mul_(2)),
        (lambda: torch.arange(3_000_001), lambda t: t[3_000_000:].add_(1)),
        (lambda: torch.arange(2_097_152, dtype=torch.float64), lambda t: t.copy_(t.roll(1 << 20))),
    ],
)
def test_a_digest_sees_any_change(
    make: Callable[[], torch.Tensor], change: Callable[[torch.Tensor], Any]
) -> None:
    tensor = make()
    views = [tensor, tensor.clone()]
    if tensor.layout is torch.strided:
        views += [torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[1:].view(tensor.shape)]
    assert len(set(digests(views))) == 1
    first = digests(views)[0]
    change(tensor)
    assert digests([tensor]) != [first]


def test_a_digest_sees_scales() -> None:
    one, other = (
        torch.quantize_per_tensor(torch.ones(4) * scale, scale, 0, torch.qint8) for scale in (0.5, 2.0)
    )
    assert torch.equal(one.int_repr(), other.int_repr())
    assert digests([one]) != digests([other])
