"""Chunks placed other than in laps train like the unsplit model: V shapes of torch's schedules, and drawn ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from pipeline_jobs import build, job, step_and_compare
from torch import nn
from torch.distributed.pipelining import schedules

import ldt
from ldt.plan import Costs, Kind, Plan, from_csv, lower_bound, optimize, simulate, to_csv, verify
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 5


def v_shaped(stages: int) -> Topology:
    return Topology([1] * stages, placement=[*range(stages), *reversed(range(stages))])


def csv_of(kind: type[Any], stages: int, microbatches: int) -> str:
    """Return the rows that torch computes for a V-shaped schedule, as its CSV."""
    schedule = object.__new__(
        kind
    )  # its constructor wants modules and process groups for what needs two numbers
    schedule.pp_group_size, schedule._n_microbatches, schedule.n_local_stages = stages, microbatches, 2
    schedule._num_stages = schedule.num_stages = 2 * stages
    rows = [schedule._calculate_single_rank_operations(rank) for rank in range(stages)]
    return "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows)


V_SCHEDULES = [schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV]


@pytest.mark.parametrize("kind", V_SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 6), (4, 11)])
def test_plans_of_v_schedules_are_proven_and_simulated(
    kind: type[Any], stages: int, microbatches: int
) -> None:
    topology = v_shaped(stages)
    text = csv_of(kind, stages, microbatches)
    plan = from_csv(text, topology)
    verify(plan)
    assert plan.num_microbatches == microbatches
    computed = [action for row in plan.rows.values() for action in row if action.kind is Kind.W]
    assert computed, "these schedules have backwards in two parts"
    assert from_csv(to_csv(plan), topology) == plan
    costs = Costs(forward=1.0, backward=2.0, weight=1.0)
    timeline = simulate(plan, costs)
    bound = lower_bound(topology, microbatches, costs, split_backward=True)
    assert bound <= timeline.makespan
    planned = optimize(topology, microbatches, costs, split_backward=True)
    assert simulate(planned, costs).makespan <= timeline.makespan


def test_an_overlapped_forward_and_backward_run_in_turn() -> None:
    text = csv_of(schedules.ScheduleDualPipeV, 2, 6)
    assert "OVERLAP_F_B" in text
    plan = from_csv(text, v_shaped(2))
    assert [action.kind for row in plan.rows.values() for action in row].count(Kind.F) == 4 * 6


@pytest.mark.parametrize("kind", V_SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 5), (3, 7)])
def test_v_schedules_train(pool: RankPool, kind: type[Any], stages: int, microbatches: int) -> None:
    plan = from_csv(csv_of(kind, stages, microbatches), v_shaped(stages))
    pool.run(run, plan, ranks=range(stages))


def run(plan: Plan) -> None:
    chunks = toy_chunks(plan.topology)
    with ldt.connect(
        plan.topology, lanes=plan.lanes or "dedicated", ranks=range(plan.topology.world_size)
    ) as mesh:
        pipeline = build(mesh, chunks, plan=Plan.from_text(plan.to_text()))
        batch = toy_microbatches(plan.num_microbatches)
        for _ in range(2):
            result = step_and_compare(mesh, pipeline, chunks, batch)
        assert [entry.action for entry in result.stats.entries] == [*plan.rows[mesh.node]]
        evaluated = pipeline.eval(batch if mesh.is_edge else None)
        if mesh.is_edge:
            losses, _ = unsplit_step(chunks, batch, toy_loss)
            assert list(evaluated.losses or ()) == [loss.detach() for loss in losses]


def drawn(seed: int) -> Plan:
    """Draw a placement of up to five stages, and a plan."""
    draw = random.Random(seed)
    stages = draw.randint(2, WORLD_SIZE)
    middle = [*range(1, stages), *(draw.randrange(stages) for _ in range(draw.randint(0, 4)))]
    draw.shuffle(middle)
    topology = Topology([1] * stages, placement=[0, *middle, 0])
    costs = Costs(
        [draw.uniform(0.1, 3) for _ in range(topology.num_chunks)],
        [draw.uniform(0.1, 3) for _ in range(topology.num_chunks)],
        latency=[draw.uniform(0, 3) for _ in range(topology.num_chunks - 1)],
    )
    return optimize(topology, draw.randint(1, 6), costs, split_backward=draw.random() < 0.5)


@pytest.mark.parametrize("seed", range(12))
def test_any_placement_trains(pool: RankPool, seed: int) -> None:
    plan = drawn(seed)
    pool.run(run, plan, ranks=range(plan.topology.world_size))


def plan_for(topology: Topology, number: int, training: bool) -> Plan:
    return optimize(topology, number, Costs(forward=1.0, backward=2.0))


@pytest.mark.parametrize(
    "topology",
    [
        Topology([1, 2], placement=[0, 1, 1, 0]),
        Topology([1, 1], dp=2, placement=[0, 1, 1, 0]),
        Topology([1, 2], dp=2, edge_dp=1, placement=[0, 1, 1, 0]),
        Topology([1, 1, 2], placement=[0, 1, 2, 2, 1, 0]),
    ],
    ids=Topology.to_text,
)
def test_ranks_of_a_stage_and_replicas(pool: RankPool, topology: Topology) -> None:
    plan = plan_for(topology, 4, True)
    if topology.dp == topology.edge_dp == 1:
        pool.run(run, plan, ranks=range(topology.world_size))
    else:
        pool.run(replicas_job, plan, ranks=range(topology.world_size))


def replicas_job(plan: Plan) -> None:
    """All replicas end with the gradient of the mean over all microbatches."""
    topology = plan.topology
    chunks = toy_chunks(topology)
    batches = [toy_microbatches(plan.num_microbatches, seed=edge) for edge in range(topology.edge_dp)]
    _, reference = unsplit_step(chunks, [pair for batch in batches for pair in batch], toy_loss)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks, plan=plan)
        pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
        for index in topology.chunks_of(mesh.stage):
            for mine, theirs in zip(chunks[index].parameters(), reference[index].parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)


def test_two_streams_of_lanes(pool: RankPool) -> None:
    topology = v_shaped(3)
    plan = optimize(topology, 5, Costs(forward=1.0, backward=2.0, latency=0.5), lanes="paired")
    pool.run(run, plan, ranks=range(3))


def test_no_plan_is_refused_by_name(pool: RankPool) -> None:
    pool.run(no_plan_job, v_shaped(2), ranks=range(2))


def no_plan_job(topology: Topology) -> None:
    chunks = toy_chunks(topology)
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks)
        with pytest.raises(ldt.LdtError, match=r"ushape supports .* use ldt.plan.optimize"):
            pipeline.step(toy_microbatches(4) if mesh.is_edge else None)


class Uneven(nn.Module):
    """Returns a row more on one rank than on the others."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.layer, self.odd = nn.Linear(16, 16), odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return torch.cat([y, y[:1]]) if self.odd else y


def test_ranks_that_disagree_before_a_local_hop_are_named(pool: RankPool) -> None:
    pool.run(disagreeing_job, ranks=range(3))


def disagreeing_job() -> None:
    topology = Topology([1, 2], placement=[0, 1, 1, 0])
    chunks = toy_chunks(topology)
    with ldt.connect(topology, ranks=range(3)) as mesh:
        chunks[1] = Uneven(mesh.tp_rank == 1)
        pipeline = build(mesh, chunks, plan=plan_for(topology, 2, True), allow_equal_weights=True)
        with pytest.raises(ldt.LdtError, match="the ranks of stage 1 disagree on what chunk 1 returns"):
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)


def test_inputs_of_a_new_shape(pool: RankPool) -> None:
    """Each call has shapes of its own, which pass local hops and stages that come twice."""
    pool.run(shapes_job, ranks=range(3))


def shapes_job() -> None:
    topology = v_shaped(3)
    for size in (3, 5):
        chunks = toy_chunks(topology)
        job(
            topology,
            lambda chunks=chunks, size=size: (chunks, toy_microbatches(3, batch=size)),
            plan=plan_for(topology, 3, True),
        )  # type: ignore[misc]
