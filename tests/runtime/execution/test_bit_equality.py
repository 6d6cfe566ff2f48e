"""Losses and all gradients equal those of the unsplit model, bit for bit, for every size of pipeline and batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_jobs import assert_equal_grads, assert_equal_losses, build, job, step_and_compare

import ldt
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import LanePolicy, Topology

WORLD_SIZE = 4


def grid(stages: int, laps: int, policy: LanePolicy) -> int:
    topology = Topology([1] * stages, laps=laps)
    chunks = toy_chunks(topology)
    numbers = sorted({1, 2, max(1, stages - 1), stages, stages + 1, 9})
    with ldt.connect(topology, lanes=policy, ranks=range(stages)) as mesh:
        pipeline = build(mesh, chunks)
        for number in numbers:
            step_and_compare(mesh, pipeline, chunks, toy_microbatches(number))
    return len(numbers)


@pytest.mark.parametrize("policy", ["dedicated", "paired"])
@pytest.mark.parametrize("laps", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_grid_of_stages_laps_and_microbatches(
    pool: RankPool, stages: int, laps: int, policy: LanePolicy
) -> None:
    """Includes two stages with four channels of one shape."""
    results = pool.run(grid, stages, laps, policy, ranks=range(stages))
    assert all(number >= 3 for number in results)


def same_shape_both_ways(policy: LanePolicy) -> None:
    torch.manual_seed(0)
    chunks = [ToyChunk(16) for _ in range(3)]
    microbatches = [(torch.randn(8, 1, 16), torch.randn(8, 1, 16)) for _ in range(4)]
    job(Topology([1, 1]), lambda: (chunks, microbatches), policy=policy)


@pytest.mark.parametrize("policy", ["dedicated", "paired"])
def test_channels_of_one_shape_are_never_interchanged(pool: RankPool, policy: LanePolicy) -> None:
    pool.run(same_shape_both_ways, policy, ranks=[0, 1])


def big_activations(policy: LanePolicy) -> None:
    torch.manual_seed(0)
    chunks = [torch.nn.Linear(64, 64, bias=False) for _ in range(3)]
    microbatches = [(torch.randn(65536, 64), torch.randn(65536, 64)) for _ in range(4)]
    topology = Topology([1, 1])
    with ldt.connect(topology, lanes=policy, ranks=[0, 1]) as mesh:
        result = step_and_compare(mesh, build(mesh, chunks), chunks, microbatches)
        hop = 65536 * 64 * 4
        assert {tuple(traffic) for traffic in result.stats.channels.values()} == {(4, 4 * hop)}


@pytest.mark.parametrize("policy", ["dedicated", "paired"])
def test_16_mib_in_both_directions(pool: RankPool, policy: LanePolicy) -> None:
    pool.run(big_activations, policy, ranks=[0, 1])


def replicated_stages(tp: list[int], laps: int, policy: LanePolicy) -> None:
    topology = Topology(tp, laps=laps)
    job(topology, lambda: (toy_chunks(topology), toy_microbatches(5)), policy=policy)


@pytest.mark.parametrize("policy", ["dedicated", "paired"])
@pytest.mark.parametrize("laps", [1, 2])
@pytest.mark.parametrize("tp", [[1, 2], [2, 1], [1, 2, 1], [2, 2], [1, 3]])
def test_stages_of_several_ranks(pool: RankPool, tp: list[int], laps: int, policy: LanePolicy) -> None:
    pool.run(replicated_stages, tp, laps, policy, ranks=range(sum(tp)))


def two_replicas(laps: int, policy: LanePolicy) -> dict[str, int]:
    topology = Topology([1, 1], dp=2, laps=laps)
    chunks = toy_chunks(topology)
    batches = [toy_microbatches(3, seed=seed) for seed in (1, 2)]
    expected = [unsplit_step(chunks, batch, toy_loss) for batch in batches]
    for first, second in zip(*(reference for _, reference in expected), strict=True):
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            one.grad = (one.grad + other.grad) / 2
    with ldt.connect(topology, lanes=policy) as mesh:
        pipeline = build(mesh, chunks)
        result = pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
        if mesh.is_edge:
            assert_equal_losses(result, expected[mesh.replica][0])
        assert_equal_grads(mesh, chunks, expected[0][1])
        assert mesh.dp_mesh.size() == 2
        return {str(entry.action): 1 for entry in result.stats.entries}


@pytest.mark.parametrize("policy", ["dedicated", "paired"])
@pytest.mark.parametrize("laps", [1, 2])
def test_two_replicas_average_their_gradients(pool: RankPool, laps: int, policy: LanePolicy) -> None:
    actions = pool.run(two_replicas, laps, policy)
    assert all("REDUCE_GRAD" in " ".join(row) for row in actions)


def gradients_add_up() -> None:
    topology = Topology([1, 1])
    chunks = toy_chunks(topology)
    once = [toy_microbatches(2, seed=seed) for seed in (1, 2)]
    references: list[Any] = [unsplit_step(chunks, batch, toy_loss)[1] for batch in once]
    with ldt.connect(topology, ranks=[0, 1]) as mesh:
        pipeline = build(mesh, chunks)
        for batch in once:
            pipeline.step(batch if mesh.is_edge else None)
        for index in topology.chunks_of(mesh.stage):
            models = zip(
                chunks[index].parameters(), *(ref[index].parameters() for ref in references), strict=True
            )
            for mine, first, second in models:
                torch.testing.assert_close(mine.grad, first.grad + second.grad)


def test_gradients_of_two_steps_add_up(pool: RankPool) -> None:
    pool.run(gradients_add_up, ranks=[0, 1])
