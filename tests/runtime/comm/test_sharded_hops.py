"""Sharded tensors between stages of any sizes: each part goes directly to the ranks that need it."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import ldt
from ldt.runtime.comm.shards import overlap, overlapping, span_of
from ldt.runtime.comm.transfer_modes import TransferChoice, Transfers
from ldt.testing import RankPool, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import LanePolicy, Topology

WORLD_SIZE = 9
WIDTH = 6


class Block(nn.Module):
    """Computes row by row, so that each rank can have its own rows, as sequence-parallel layers do.

    In a pipeline, the head splits the rows and the tail gathers them; a tensor that every rank has travels with them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mesh: ldt.Mesh | None = None
        self.dim = 0
        self.is_tail = False

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Any:
        y: Tensor
        if isinstance(x, DTensor):
            assert self.mesh is not None
            assert x.placements == (Shard(self.dim),)
            assert x.device_mesh.size() == self.mesh.topology.tp[self.mesh.stage]
            part = self.body(x.to_local(), factor)
            y = DTensor.from_local(part, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
            y = y.full_tensor() if self.is_tail else y
        else:
            y = self.body(x, factor)
            if self.mesh is not None:
                y = DTensor.from_local(y, self.mesh.tp_mesh, [Replicate()]).redistribute(
                    placements=[Shard(self.dim)]
                )
        return y if self.is_tail else (y, torch.full((3,), 0.5))

    def body(self, x: Tensor, factor: Tensor | None) -> Tensor:
        y = torch.tanh(self.linear(x))
        return y if factor is None else y * factor.sum()


def run(
    tp: Sequence[int],
    laps: int,
    policy: LanePolicy,
    transfer: TransferChoice,
    rows: Sequence[int],
    dim: int,
    edge_dp: int = 1,
    dp: int = 1,
) -> dict[str, int]:
    """Compare two steps with the unsplit model. Returns bytes sent, by lane."""
    torch.manual_seed(0)
    topology = Topology(tp, laps=laps, dp=dp, edge_dp=edge_dp)
    chunks = [Block() for _ in range(topology.num_chunks)]
    chunks[-1].is_tail = True
    microbatches = [toy_microbatches(1, width=WIDTH, batch=n, seed=n)[0] for n in rows]
    if dim == 1:
        microbatches = [(x[None], y[None]) for x, y in microbatches]
    losses, reference = unsplit_step(chunks, microbatches, toy_loss)
    with ldt.connect(topology, lanes=policy, transfer=transfer, ranks=range(topology.world_size)) as mesh:
        mine = copy.deepcopy([chunks[c] for c in topology.chunks_of(mesh.stage)])
        for module in mine:
            module.mesh, module.dim = mesh, dim
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss)
        for times in (1, 2):
            result = pipeline.step(microbatches if mesh.is_edge else None)
            if mesh.is_edge:
                torch.testing.assert_close(result.losses, losses, rtol=1e-6, atol=0.0)
            for chunk, module in zip(topology.chunks_of(mesh.stage), mine, strict=True):
                for parameter, theirs in zip(module.parameters(), reference[chunk].parameters(), strict=True):
                    grad = parameter.grad.clone()  # type: ignore[union-attr]
                    if chunk > 0:  # only this rank's rows
                        dist.all_reduce(grad, group=mesh.tp_mesh.get_group())
                    torch.testing.assert_close(grad, times * theirs.grad, rtol=1e-5, atol=1e-6)
        return {name: lane["sent_bytes"] for name, lane in result.stats.lanes.items() if lane["sent_bytes"]}


SIZES = [[1, 2], [2, 1], [2, 2], [1, 4], [4, 1, 3], [2, 3], [2, 4, 1]]
CASES = [  # all sizes with one lap and with two, each with one choice of transfers; `make slow` runs the other
    pytest.param(
        tp, laps, policy, dim, transfer, marks=[pytest.mark.slow] if (row + laps + column) % 2 else []
    )
    for row, tp in enumerate(SIZES)
    for laps, policy, dim in [(1, "dedicated", 0), (2, "paired", 1)]
    for column, transfer in enumerate(["direct", "auto"])
]


@pytest.mark.parametrize(("tp", "laps", "policy", "dim", "transfer"), CASES, ids=str)
def test_between_stages_of_any_sizes(
    pool: RankPool, tp: list[int], laps: int, policy: LanePolicy, dim: int, transfer: TransferChoice
) -> None:
    """Test rows that divide evenly, fewer rows than ranks (so that some have none), and more."""
    pool.run(run, tp, laps, policy, transfer, [12, 7, 1, 5], dim, ranks=range(sum(tp)))


def test_each_row_crosses_a_link_once(pool: RankPool) -> None:
    """Two ranks to four to three: each node sends the tensor once, whatever its number of ranks."""
    rows = [12, 12]
    by_rank = pool.run(run, [2, 4, 3], 1, "dedicated", "direct", rows, 0, ranks=range(9))
    tensor, factor = sum(rows) * WIDTH * 4, len(rows) * 3 * 4
    sent = [sum(lanes.values()) for lanes in by_rank]
    assert sum(sent[:2]) == 2 * tensor + factor, "activations to stage 1, gradients to stage 2"
    assert sum(sent[2:6]) == 2 * tensor + factor
    assert sum(sent[6:]) == 2 * tensor + factor
    assert min(sent) >= tensor // 4, "every rank sends rows of its own"


@pytest.mark.parametrize(("dp", "edge_dp"), [(2, 1), (2, 2)])
def test_replicas(pool: RankPool, dp: int, edge_dp: int) -> None:
    pool.run(run_replicas, dp, edge_dp, ranks=range(edge_dp + 2 * dp))


def run_replicas(dp: int, edge_dp: int) -> None:
    run([1, 2], 1, "dedicated", "direct", [4, 6], 0, edge_dp=edge_dp, dp=dp)


def test_a_transfer_mode_per_link(pool: RankPool) -> None:
    ways = {(1, 2): "direct", (1, 0): "direct", (0, 2): "auto"}
    pool.run(run, [1, 2, 2], 1, "dedicated", ways, [4], 0, ranks=range(5))


def refused(transfer: TransferChoice) -> str:
    with pytest.raises(ldt.LdtError) as caught:
        run([1, 2], 1, "dedicated", transfer, [4], 0)
    return str(caught.value)


@pytest.mark.parametrize("transfer", ["leader", "scatter", {(0, 1): "leader"}], ids=str)
def test_links_that_cannot_carry_sharded_tensors(pool: RankPool, transfer: TransferChoice) -> None:
    for text in pool.run(refused, transfer, ranks=range(3)):
        assert "chunk 0 returns float32[4, 6] split over the ranks in dimension 0 with grad" in text
        assert 'transfer="direct"' in text


class Replicating(Block):
    """Returns a replicated DTensor."""

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Any:
        assert self.mesh is not None
        return DTensor.from_local(self.body(x, None), self.mesh.tp_mesh, [Replicate()])


def other_dtensors() -> str:
    topology = Topology([1, 2])
    with ldt.connect(topology, transfer="direct", ranks=range(3)) as mesh:
        torch.manual_seed(mesh.stage)
        mine = [Replicating() for _ in topology.chunks_of(mesh.stage)]
        for module in mine:
            module.mesh = mesh
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss)
        with pytest.raises((TypeError, ldt.LdtError)) as caught:
            pipeline.step(toy_microbatches(1, width=WIDTH) if mesh.is_edge else None)
        return str(caught.value)


def test_dtensors_that_are_not_sharded(pool: RankPool) -> None:
    for text in pool.run(other_dtensors, ranks=range(3)):
        assert "tensor 0 is a DTensor of (Replicate(),) over DeviceMesh" in text
        assert "redistribute it to Shard over mesh.tp_mesh alone" in text


@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 8))
def test_parts_tile_a_dimension(size: int, sources: int, targets: int) -> None:
    """Parts are those of torch.chunk; a target receives exactly its part from all sources, in order."""
    whole = torch.arange(size)
    chunks = list(whole.chunk(sources)) if size else []
    spans = [span_of(size, place, sources) for place in range(sources)]
    for place, span in enumerate(spans):
        expected = chunks[place] if place < len(chunks) else whole[:0]
        assert torch.equal(whole[slice(*span)], expected)
    for place in range(targets):
        target = span_of(size, place, targets)
        got = [overlap(whole[slice(*span)], 0, span, target) for span in spans]
        assert torch.equal(torch.cat(got), whole[slice(*target)])


@pytest.mark.parametrize(("sources", "targets"), [(1, 3), (2, 3), (3, 2), (4, 3), (5, 4), (4, 8), (8, 6)])
def test_overlapping_parts(sources: int, targets: int) -> None:
    """``overlapping`` agrees with an exhaustive search over much larger dimensions than it tries."""
    found = set()
    for size in range(1, 3001):
        mine, theirs = (
            torch.arange(parts).repeat_interleave(math.ceil(size / parts))[:size]
            for parts in (sources, targets)
        )
        found |= set((mine * targets + theirs).tolist())
    assert overlapping(sources, targets) == tuple(sorted(divmod(pair, targets) for pair in found))


def test_stripes_connect_only_ranks_whose_parts_overlap() -> None:
    """Each stripe costs a communicator; 32 pairs are tested."""
    assert len(overlapping(4, 8)) == 14
    topology = Topology([4, 8])
    stripes = Transfers.of(topology, "direct").stripes(topology.channel(0, "F", 0))
    assert [stripe[:2] for stripe in stripes if stripe.direct] == list(overlapping(4, 8))


@pytest.mark.parametrize(
    ("ways", "sentence"),
    [
        (
            {(0, "1"): "direct"},
            "transfer names a link (0, '1'), but the links of tp=1,2 dp=1 edge_dp=1 laps=1 are",
        ),
        ({(0, 1): "direct", (1, 0): "leader"}, "transfer names the link (0, 1) twice: give only one of"),
        ({(1, 0): "auto", (0, 1): "auto"}, "transfer names the link (0, 1) twice: give only one of"),
        ({(0, 1): None}, "or a dict of these by link such as {(0, 1): 'direct'}, got None"),
    ],
    ids=str,
)
def test_invalid_transfer_modes_by_link(ways: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Transfers.of(Topology([1, 2]), ways)
