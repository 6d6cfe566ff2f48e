"""Costs measured on real steps: each value belongs to its chunk or hop, and nothing else changes."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import pytest
import torch
from pipeline_jobs import build

import ldt
from ldt.plan import Costs
from ldt.runtime.mesh import link_probe
from ldt.testing import RankPool, SleepingChunk, ToyChunk, in_time, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
LEAST_RATE = 20e6  # bytes per second: any machine's loopback is faster
SLEEPS = [0.03, 0.02, 0.01, 0.0]  # of each chunk's forward


def measured(tp: list[int], dp: int, laps: int, options: dict[str, Any]) -> Costs:
    topology = Topology(tp, dp=dp, edge_dp=1, laps=laps)
    torch.manual_seed(0)
    chunks = [SleepingChunk(16, SLEEPS[chunk % 4], SLEEPS[chunk % 4]) for chunk in range(topology.num_chunks)]
    batch = toy_microbatches(3, batch=2)
    with ldt.connect(topology, ranks=range(topology.world_size), **options) as mesh:
        pipeline = build(mesh, chunks)
        pipeline.step(batch if mesh.is_edge else None)
        before = [p.grad.clone() for p in pipeline.parameters() if p.grad is not None]
        costs = Costs.measure(pipeline, iter(batch) if mesh.is_edge else None, steps=2)
        after = [p.grad for p in pipeline.parameters() if p.grad is not None]
        assert len(before) > 0
        assert list(map(torch.equal, before, after)) == [True] * len(before)
        pipeline.step(batch if mesh.is_edge else None)
        costs.check(topology)
        return costs


def failing_probe() -> str:
    """The cloud's rank fails between two messages, and its process continues."""
    with ldt.connect(Topology([1, 1]), ranks=[0, 1]) as mesh, pytest.MonkeyPatch.context() as patch:
        pipeline = build(mesh, [ToyChunk(16) for _ in range(3)])
        if not mesh.is_edge:
            patch.setattr(link_probe, "round_trips", lambda *_: 1 / 0)
        start = time.monotonic()
        with pytest.raises((ZeroDivisionError, ldt.RemoteStageError)) as caught:
            pipeline.measure_costs(toy_microbatches(2) if mesh.is_edge else None)
        assert in_time(time.monotonic() - start, 5)
        assert mesh.failed
        return str(caught.value)


def test_a_failing_probe_is_reported_to_all(pool: RankPool) -> None:
    at_edge, _ = pool.run(failing_probe, ranks=[0, 1])
    assert "rank 1 (stage 1, replica 0) failed first in measure_costs(): ZeroDivisionError" in at_edge


def mistaken(steps: list[Any]) -> tuple[str, str]:
    """The edge's loader fails; then ranks pass invalid, or different, numbers of steps."""
    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=[0, 1]) as mesh:
        pipeline = build(mesh, [ToyChunk(16) for _ in range(3)])
        with pytest.raises((ZeroDivisionError, ldt.RemoteStageError)) as caught:
            pipeline.measure_costs((1 / 0 for _ in range(2)) if mesh.is_edge else None)
        with pytest.raises((ValueError, ldt.LdtError)) as refused:
            pipeline.measure_costs(toy_microbatches(2) if mesh.is_edge else None, steps=steps[mesh.rank])
        pipeline.measure_costs(toy_microbatches(2) if mesh.is_edge else None, steps=1)
        return str(caught.value), str(refused.value)


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([1, 0], "steps must be a number from 1 on, got 0"),
        ([True, 1], "steps must be a number from 1 on, got True"),
        ([1, 2], "all ranks must be given equal numbers of steps"),
    ],
)
def test_mistakes_are_reported_to_all(pool: RankPool, steps: list[Any], sentence: str) -> None:
    (at_edge, refused), (at_cloud, refused_too) = pool.run(mistaken, steps, ranks=[0, 1])
    assert at_edge == "division by zero"
    assert "the edge, called step() off" in at_cloud
    assert sentence in refused
    assert sentence in refused_too


@pytest.mark.parametrize(
    ("tp", "dp", "laps", "options"),
    [
        ([1, 1, 1], 1, 1, {}),
        ([1, 2], 1, 2, {"lanes": "paired"}),
        ([1], 1, 1, {}),
        ([1, 1], 2, 1, {"connections": 2}),
    ],
)
def test_each_figure_is_that_of_its_chunk_or_hop(
    pool: RankPool, tp: list[int], dp: int, laps: int, options: dict[str, Any]
) -> None:
    """Sleeps are a lower bound on any machine; the upper bound assumes an idle one."""
    size = Topology(tp, dp=dp, edge_dp=1).world_size
    answers = pool.run(measured, tp, dp, laps, options, ranks=range(size))
    assert all(answer == answers[0] for answer in answers), (
        "equal on all ranks, as plans made of them must be"
    )
    costs, topology = answers[0], Topology(tp, dp=dp, edge_dp=1, laps=laps)
    for chunk in range(topology.num_chunks):
        least = SLEEPS[chunk % 4]
        for times, cost in ((1, costs.forward[chunk]), (2, costs.backward[chunk])):
            assert times * least <= cost
            assert in_time(cost - times * least, 0.2)
    for hop in range(topology.tail):
        crosses = topology.crosses(hop)
        for sizes in costs.bytes.values():
            assert sizes[hop] == (2 * 16 * 4 if crosses else 0)
        assert (costs.latency[hop] > 0) == crosses
        assert in_time(costs.latency[hop], 0.1)
        for rates in costs.bandwidth.values():
            assert in_time(LEAST_RATE / rates[hop], 1)
    pipes = defaultdict(set)
    for channel in topology.channels:
        way = "up" if channel.source.stage < channel.target.stage else "down"
        if not topology.is_local(channel):
            pipes[topology.pipe_of(channel)].add(costs.bandwidth[way][channel.hop])
    assert all(len(rates) == 1 for rates in pipes.values()), "what shares a pipe has one bandwidth"
