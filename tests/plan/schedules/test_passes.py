"""Passes: pure, undone by their inverse, right for any compute order, with bounded buffers."""

import pytest
from brute_force import works
from hypothesis import given
from hypothesis import strategies as st
from strategies import any_compute_plan

from ldt.errors import PlanError
from ldt.plan import (
    Action,
    Kind,
    Plan,
    add_communication,
    add_grad_reduction,
    buffers_needed,
    remove_communication,
    ushape,
    verify,
)
from ldt.topology import Node, Topology


@given(any_compute_plan(), st.sampled_from(["dedicated", "paired"]), st.integers(1, 3))
def test_any_compute_order_gets_working_communication(plan, policy, receive_buffers):
    complete = add_communication(plan, policy, receive_buffers)
    verify(complete)
    assert works(complete, policy)
    assert remove_communication(complete) == plan
    assert add_communication(complete, policy, receive_buffers) == complete
    assert Plan.from_text(complete.to_text()) == complete


def test_receives_are_hoisted_as_far_as_buffers_allow():
    topology = Topology([1, 1])
    rows = {Node(0, 0): "0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3", Node(1, 0): "1F0 1F1 1F2 1F3"}
    actions = {node: [Action.parse(text) for text in row.split()] for node, row in rows.items()}
    plan = Plan(topology, 4, actions, training=False)
    expected = {
        2: "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_F2 1F1 1SEND_F1 1RECV_F3 1F2 1SEND_F2 1F3 1SEND_F3",
        3: "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1SEND_F0 1RECV_F3 1F1 1SEND_F1 1F2 1SEND_F2 1F3 1SEND_F3",
        9: "1RECV_F0 1RECV_F1 1RECV_F2 1RECV_F3 1F0 1SEND_F0 1F1 1SEND_F1 1F2 1SEND_F2 1F3 1SEND_F3",
    }
    for receive_buffers, row in expected.items():
        complete = add_communication(plan, "dedicated", receive_buffers)
        assert " ".join(map(str, complete.rows[Node(1, 0)])) == row
        assert buffers_needed(complete)[topology.channel(0, "F", 0)] == min(receive_buffers, 4)


def test_buffers_grow_where_the_order_needs_them():
    """The edge sends all its forwards before its first receive, so the cloud's results must be received in between."""
    plan = ushape(Topology([1] * 8), 32, receive_buffers=1)
    assert set(buffers_needed(plan)) == set(plan.topology.channels)
    assert 1 <= max(buffers_needed(plan).values()) <= 8


@pytest.mark.parametrize("policy", ["dedicated", "paired"])
@pytest.mark.parametrize("laps", [1, 2])
@pytest.mark.parametrize("stages", [2, 3, 8])
def test_buffers_are_bounded_by_the_stages(stages, laps, policy):
    for receive_buffers in (1, 2, 4):
        plan = ushape(Topology([1] * stages, laps=laps), 32, lanes=policy, receive_buffers=receive_buffers)
        assert max(buffers_needed(plan).values()) <= max(receive_buffers, stages)


def test_reduction_pass_is_idempotent_and_leaves_single_replicas_alone():
    single = ushape(Topology([1, 1]), 3)
    assert add_grad_reduction(single) == single
    double = ushape(Topology([1, 1], dp=2), 3)
    assert add_grad_reduction(double) == double
    assert add_grad_reduction(remove_communication(double)) == remove_communication(double)


def test_replicas_of_different_order_reduce_at_the_end():
    """With a shared edge, one cloud replica may finish a chunk before another starts it."""
    topology = Topology([1, 1], dp=2, edge_dp=1, laps=2)
    edge = "0F0 2F0 4F0 4B0 2B0 0B0 0F1 2F1 4F1 4B1 2B1 0B1"
    rows = {Node(0, 0): edge, Node(1, 0): "1F0 3F0 3B0 1B0", Node(1, 1): "1F1 3F1 3B1 1B1"}
    plan = Plan(topology, 2, {node: list(map(Action.parse, row.split())) for node, row in rows.items()})
    plan = add_grad_reduction(plan)
    assert add_grad_reduction(plan) == plan
    assert plan.rows[Node(1, 0)][-3:] == tuple(map(Action.parse, ("1B0", "3REDUCE_GRAD", "1REDUCE_GRAD")))
    verify(add_communication(plan, "paired"))


def test_compute_rows_that_cannot_work_are_refused():
    topology = Topology([1])
    plan = Plan(topology, 1, {Node(0, 0): [Action(1, Kind.F, 0), Action(0, Kind.F, 0)]}, training=False)
    with pytest.raises(PlanError, match="has 1F0 before 0F0, which it needs"):
        add_communication(plan, "dedicated")
