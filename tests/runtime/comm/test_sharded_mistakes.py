"""Wrong sharded tensors, or wrong specs of them, raise one clear error on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from split_tensors import gathered, like, part_of, split, step_error
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Shard

import ldt
from ldt.runtime import TensorSpec
from ldt.testing import RankPool, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 6
WIDTH = 16


class Rows(nn.Module):
    """Computes on rows; the head shards them, the tail gathers them."""

    def __init__(self, mesh: ldt.Mesh, chunk: int) -> None:
        super().__init__()
        self.mesh = mesh
        self.is_head, self.is_tail = chunk == 0, chunk == mesh.topology.tail
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = like(self.linear(part_of(x)), x)
        return split(y, self.mesh, 0) if self.is_head else gathered(y) if self.is_tail else y


# -- a part of a wrong size ------------------------------------------------------------------------------------


class WrongPart(Rows):
    """In the head, each rank returns its number of ``rows`` out of 7, which torch.chunk splits into 4 and 3."""

    def __init__(self, mesh: ldt.Mesh, chunk: int, rows: tuple[int, int]) -> None:
        super().__init__(mesh, chunk)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_head:
            return super().forward(x)
        part = self.linear(x)[: self.rows[self.mesh.tp_rank]]
        return DTensor.from_local(part, self.mesh.tp_mesh, [Shard(0)], shape=x.shape, stride=x.stride())


def wrong_part(tp: list[int], rows: tuple[int, int]) -> str:
    return step_error(Topology(tp), lambda mesh, chunk: WrongPart(mesh, chunk, rows), transfer="direct")


@pytest.mark.parametrize("tp", [[2, 2], [2, 1]], ids=str)
@pytest.mark.parametrize(
    ("rows", "rank", "right", "wrong"),
    [((4, 2), 1, 3, 2), ((5, 2), 0, 4, 5), ((3, 4), 0, 4, 3), ((7, 7), 0, 4, 7)],
)
def test_a_part_of_a_wrong_size(
    pool: RankPool, tp: list[int], rows: tuple[int, int], rank: int, right: int, wrong: int
) -> None:
    """Too short, too long, split elsewhere, and whole on each rank. ``DTensor.from_local`` does not check."""
    texts = pool.run(wrong_part, tp, rows, ranks=range(sum(tp)))
    about = f"rank {rank} must have a part of [{right}, {WIDTH}], as torch.chunk cuts it, but has [{wrong}, {WIDTH}]"
    informed = [text for i, text in enumerate(texts) if i >= 2 or i == rank]
    assert all(about in text for text in informed), texts
    assert all("is a DTensor of [7, 16] sharded over 2 ranks in dimension 0" in text for text in texts)


class ShortLater(Rows):
    """Fake tensors are right, then rank 1 of the cloud returns fewer rows."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        late = self.mesh.stage == 1 and self.mesh.tp_rank == 1 and not isinstance(part_of(x), FakeTensor)
        return like(part_of(y)[:1], y) if late else y


def short_later() -> str:
    return step_error(Topology([1, 2]), ShortLater, transfer="direct")


def test_a_part_that_is_wrong_only_in_the_step(pool: RankPool) -> None:
    for text in pool.run(short_later, ranks=range(3)):
        assert "output of chunk 1 for microbatch 0, tensor 0 is a DTensor of [7, 16]" in text
        assert "rank 1 must have a part of [3, 16], as torch.chunk cuts it, but has [1, 16]" in text


# -- inputs and declared outputs -------------------------------------------------------------------------------


def dtensor_inputs() -> list[float]:
    """The edge's ranks give the head their rows of the inputs; the loss equals that of whole inputs."""
    topology = Topology([2, 2])
    torch.manual_seed(0)
    with ldt.connect(topology, transfer="direct", ranks=range(4)) as mesh:
        chunks = [Rows(mesh, chunk) for chunk in range(topology.num_chunks)]
        batch = toy_microbatches(2, width=WIDTH, batch=7)
        given = [(split(x, mesh, 0), target) for x, target in batch] if mesh.is_edge else None
        for chunk in chunks:
            chunk.is_head = False  # the inputs are already split
        result = ldt.Pipeline(
            [chunks[c] for c in topology.chunks_of(mesh.stage)], mesh, loss_fn=toy_loss
        ).step(given)
        whole = [
            toy_loss(nn.Sequential(*(chunk.linear for chunk in chunks))(x), target) for x, target in batch
        ]
        torch.testing.assert_close(result.losses or whole, whole)
        return [loss.item() for loss in result.losses or []]


def test_sharded_inputs_of_the_head(pool: RankPool) -> None:
    losses = pool.run(dtensor_inputs, ranks=range(4))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


class Declared(Rows):
    """Declares its output, with a given ``shard``."""

    def __init__(self, mesh: ldt.Mesh, chunk: int, shard: int) -> None:
        super().__init__(mesh, chunk)
        self.shard = shard

    def output_spec(self, inputs: TensorSpec) -> TensorSpec:
        return TensorSpec(inputs.shape, inputs.dtype, requires_grad=True, shard=self.shard)


def declared(shard: int, where: int) -> str:
    def make(mesh: ldt.Mesh, chunk: int) -> nn.Module:
        return Declared(mesh, chunk, shard) if chunk == where else Rows(mesh, chunk)

    return step_error(Topology([1, 2]), make, transfer="direct")


@pytest.mark.parametrize("where", [0, 1])
def test_a_declared_dimension(pool: RankPool, where: int) -> None:
    """-2 is the first of two dimensions; there is no dimension 5."""
    assert pool.run(declared, -2, where, ranks=range(3)) == ["", "", ""]
    for text in pool.run(declared, 5, where, ranks=range(3)):
        assert f"cannot tell what chunk {where} (Declared) returns" in text
        assert "the shard of a spec that output_spec returns must be one of its 2 dimensions" in text
        assert "shard=5" in text


# -- what only looks like a mistake ------------------------------------------------------------------------------


class Spare(Rows):
    """The head returns a second tensor, which the tail does not use."""

    def forward(self, x: Tensor, spare: Tensor | None = None) -> Any:
        y = super().forward(x)
        return (y, y * 2.0) if self.is_head else y


def unused(tp: list[int]) -> str:
    return step_error(Topology(tp), Spare, transfer="direct")


@pytest.mark.parametrize("tp", [[2], [2, 3]], ids=str)
def test_an_unused_sharded_tensor(pool: RankPool, tp: list[int]) -> None:
    """Test a hop within a node, and hops between nodes."""
    assert pool.run(unused, tp, ranks=range(sum(tp))) == [""] * sum(tp)
