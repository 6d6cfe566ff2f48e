"""Plans that ranks were given or made: the same everywhere, and such that the runtime can run them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from pipeline_jobs import build, step_and_compare

import ldt
import ldt.plan
from ldt.plan import Action, Kind, Plan
from ldt.testing import RankPool, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
TOPOLOGY = Topology([1, 1, 1])


def of_the_rank(topology: Topology, num_microbatches: int, training: bool) -> Plan:
    """Valid, but rank 1 posts its receives at other places."""
    buffers = 1 if dist.get_rank() == 1 else 2
    return ldt.plan.ushape(topology, num_microbatches, training=training, receive_buffers=buffers)


def split_backwards(topology: Topology, num_microbatches: int, training: bool) -> Plan:
    """Every backward as one of the input and one of the weights."""
    plan = ldt.plan.remove_communication(ldt.plan.ushape(topology, num_microbatches, training=training))
    rows = {}
    for node, row in plan.rows.items():
        rows[node] = [
            part
            for action in row
            for part in (
                [action._replace(kind=Kind.I), action._replace(kind=Kind.W)]
                if action.kind is Kind.B
                else [action]
            )
        ]
    split = ldt.plan.add_communication(plan.with_rows(rows, None), "dedicated")
    ldt.plan.verify(split)
    assert Action(1, Kind.W, 0) in split.rows[topology.nodes[1]]
    return split


def stepped(factory: Callable[[Topology, int, bool], Plan], mode: str) -> tuple[str, str, bool]:
    """One call with a bad plan. Returns type and text of the error, and whether the mesh survived."""
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
def test_a_factory_that_gives_ranks_different_plans(pool: RankPool, mode: str) -> None:
    answers = pool.run(stepped, of_the_rank, mode)
    for rank, (kind, text, _) in enumerate(answers):
        assert kind == ("LdtError" if rank == 1 else "RemoteStageError")
        assert f"this rank's plan for 4 microbatches of {mode}() is not that of rank 0, the edge" in text
        assert "plan_factory must give equal plans on all ranks" in text


KINDS = "the plan has actions of kind I, W, the runtime runs only B, F, RECV_B"


def test_a_factory_whose_plans_cannot_be_run(pool: RankPool) -> None:
    answers = pool.run(stepped, split_backwards, "step")
    assert [kind for kind, _, _ in answers] == ["PlanError", "RemoteStageError", "RemoteStageError"]
    assert all(KINDS in text and usable for _, text, usable in answers)


def given() -> tuple[str, str]:
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        with pytest.raises(ldt.PlanError) as caught:
            build(mesh, chunks, plan=split_backwards(TOPOLOGY, 4, True))
        step_and_compare(mesh, build(mesh, chunks), chunks, toy_microbatches(2))
        return type(caught.value).__name__, str(caught.value)


def test_a_given_plan_that_cannot_be_run(pool: RankPool) -> None:
    for kind, text in pool.run(given):
        assert kind == "PlanError"
        assert KINDS in text
