"""Tests that the plans of all ranks are equal, and valid for the mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from pipeline_jobs import build, step_and_compare

import ldt
import ldt.plan
from ldt.plan import Plan
from ldt.testing import RankPool, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
TOPOLOGY = Topology([1, 1, 1])


def of_the_rank(topology: Topology, num_microbatches: int, training: bool) -> Plan:
    """Return a valid plan, but post receives at other positions on rank 1."""
    buffers = 1 if dist.get_rank() == 1 else 2
    return ldt.plan.ushape(topology, num_microbatches, training=training, receive_buffers=buffers)


def of_another_topology(topology: Topology, num_microbatches: int, training: bool) -> Plan:
    return ldt.plan.ushape(Topology([1, 1]), num_microbatches, training=training)


def of_other_lanes(topology: Topology, num_microbatches: int, training: bool) -> Plan:
    return ldt.plan.ushape(topology, num_microbatches, training=training, lanes="paired")


def of_fewer_microbatches(topology: Topology, num_microbatches: int, training: bool) -> Plan:
    return ldt.plan.ushape(topology, num_microbatches - 1, training=training)


def forward_only(topology: Topology, num_microbatches: int, training: bool) -> Plan:
    return ldt.plan.ushape(topology, num_microbatches, training=False)


def stepped(factory: Callable[[Topology, int, bool], Plan], mode: str) -> tuple[str, str, bool]:
    """Make one call with a bad plan. Returns type and text of the error, and whether the mesh is usable."""
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks, plan_factory=factory)
        with pytest.raises(ldt.LdtError) as caught:
            getattr(pipeline, mode)(toy_microbatches(4) if mesh.is_edge else None)
        usable = not mesh.failed
        if usable:
            step_and_compare(mesh, build(mesh, chunks), chunks, toy_microbatches(2))
        return type(caught.value).__name__, str(caught.value), usable


@pytest.mark.parametrize("mode", ["step", "eval"])
def test_a_factory_with_different_plans_on_ranks(pool: RankPool, mode: str) -> None:
    answers = pool.run(stepped, of_the_rank, mode)
    for rank, (kind, text, _) in enumerate(answers):
        assert kind == ("LdtError" if rank == 1 else "RemoteStageError")
        assert (
            f"this rank's plan for 4 microbatches of {mode}() differs from that of rank 0, the edge" in text
        )
        assert "plan_factory must return equal plans on all ranks" in text


def nothing(topology: Topology, num_microbatches: int, training: bool) -> Plan:
    return None  # type: ignore[return-value]


WRONG = {
    nothing: "expected an ldt.plan.Plan, got NoneType: parse a text with Plan.from_text, and return a Plan",
    of_another_topology: "the plan is for topology tp=1,1 ",
    of_other_lanes: "the plan is for 'paired' lanes",
    of_fewer_microbatches: "plan_factory must return a plan for 4 microbatches of step(), got one for 3 of step()",
    forward_only: "plan_factory must return a plan for 4 microbatches of step(), got one for 4 of eval()",
}


@pytest.mark.parametrize("factory", WRONG)
def test_a_factory_whose_plans_do_not_match(pool: RankPool, factory: Callable[..., Plan]) -> None:
    answers = pool.run(stepped, factory, "step")
    assert [kind for kind, _, _ in answers] == ["PlanError", "RemoteStageError", "RemoteStageError"]
    assert all(WRONG[factory] in text and usable for _, text, usable in answers)


def given(factory: Callable[..., Plan]) -> tuple[str, str]:
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        with pytest.raises(ldt.PlanError) as caught:
            build(mesh, chunks, plan=factory(TOPOLOGY, 4, True))
        step_and_compare(mesh, build(mesh, chunks), chunks, toy_microbatches(2))
        return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("factory", [of_another_topology, of_other_lanes])
def test_a_given_plan_that_does_not_match(pool: RankPool, factory: Callable[..., Plan]) -> None:
    for kind, text in pool.run(given, factory):
        assert kind == "PlanError"
        assert WRONG[factory] in text


def bare() -> None:
    """Run a plan of compute actions only, for two replicas: sends, receives and reductions are added."""
    topology = Topology([1], dp=2)
    plan = ldt.plan.ushape(topology, 3)
    rows = {node: [a for a in row if a.kind.is_compute] for node, row in plan.rows.items()}
    with ldt.connect(topology, ranks=[0, 1]) as mesh:
        pipeline = build(mesh, toy_chunks(topology), plan=plan.with_rows(rows, None))
        pipeline.step(toy_microbatches(3, seed=mesh.replica))
        assert pipeline.plan(3) == plan


def test_a_bare_plan_is_completed(pool: RankPool) -> None:
    pool.run(bare, ranks=[0, 1])


def other_sizes(tp: list[int], with_factory: bool) -> list[str]:
    """Run steps of 4, 2 and 4 microbatches with a plan for 4, parsed from its text, and evals of other sizes."""
    topology = Topology(tp)
    chunks = toy_chunks(topology)
    plan = Plan.from_text(ldt.plan.ushape(topology, 4).to_text())
    factory = (lambda *args: ldt.plan.ushape(args[0], args[1], training=args[2])) if with_factory else None
    texts = []
    with ldt.connect(topology) as mesh:
        pipeline = build(mesh, chunks, plan=plan, plan_factory=factory)
        assert pipeline.plan(4) == plan
        for number in (4, 2, 4):
            try:
                step_and_compare(mesh, pipeline, chunks, toy_microbatches(number))
            except ldt.LdtError as error:
                texts.append(str(error))
            pipeline.eval(toy_microbatches(number + 1) if mesh.is_edge else None)
    return texts


@pytest.mark.parametrize("tp", [[1, 1, 1], [2, 1]])
def test_a_given_plan_is_for_its_number_of_microbatches(pool: RankPool, tp: list[int]) -> None:
    """Another number is refused before anything is sent, unless there is a factory."""
    for texts in pool.run(other_sizes, tp, False):
        assert len(texts) == 1
        assert "the plan given to Pipeline is for 4 microbatches, step() got 2" in texts[0]
    assert pool.run(other_sizes, tp, True) == [[]] * 3
