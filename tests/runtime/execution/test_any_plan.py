"""Random plans of every generator run as drawn, and train like the unsplit model."""

from __future__ import annotations

import random
from typing import get_args

import pytest
from pipeline_jobs import build, step_and_compare

import ldt
from ldt.plan import Costs, Plan, optimize, ushape
from ldt.testing import RankPool, toy_chunks, toy_microbatches
from ldt.topology import LanePolicy, Topology

WORLD_SIZE = 4


def drawn(seed: int) -> Plan:
    """Draw a plan."""
    draw = random.Random(seed)
    stages, number = draw.randint(1, 4), draw.randint(1, 7)
    generator = draw.choice(["ushape", "optimize", "split", "limited"])
    topology = Topology([1] * stages, laps=draw.randint(1, 2 if generator == "ushape" else 3))
    lanes: LanePolicy = draw.choice(get_args(LanePolicy))
    if generator == "ushape":
        return ushape(topology, number, lanes=lanes, receive_buffers=draw.randint(1, 3))

    def figures(least: float, number: int) -> list[float]:
        return [draw.uniform(least, 3) for _ in range(number)]

    chunks = topology.num_chunks
    costs = Costs(
        figures(0.1, chunks), figures(0.2, chunks), latency=figures(0, chunks - 1) if chunks > 1 else 0.0
    )
    limit = max(map(len, map(topology.chunks_of, range(stages)))) + draw.randint(0, 2)
    return optimize(
        topology,
        number,
        costs,
        memory_limit=limit if generator == "limited" else None,
        split_backward=generator == "split",
        lanes=lanes,
    )


def run(plan: Plan) -> list[str]:
    chunks = toy_chunks(plan.topology)
    with ldt.connect(
        plan.topology, lanes=plan.lanes or "dedicated", ranks=range(plan.topology.world_size)
    ) as mesh:
        pipeline = build(mesh, chunks, plan=Plan.from_text(plan.to_text()))
        for _ in range(2):
            result = step_and_compare(mesh, pipeline, chunks, toy_microbatches(plan.num_microbatches))
        return [str(entry.action) for entry in result.stats.entries]


@pytest.mark.parametrize("seed", range(24))
def test_a_plan_runs_as_it_stands(pool: RankPool, seed: int) -> None:
    plan = drawn(seed)
    rows = pool.run(run, plan, ranks=range(plan.topology.world_size))
    assert rows == [list(map(str, row)) for row in plan.rows.values()]
