"""Passes: pure, undone by their inverse, right for any compute order, bounded in buffers."""

import pytest
from brute_force import works
from hypothesis import given, settings
from hypothesis import strategies as st

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


@st.composite
def any_compute_plan(draw):
    """A valid compute-only plan in no particular order: any possible action of any node, again and again.

    A reduction is an action of all replicas at once.
    """
    topology = Topology(
        [1] * draw(st.integers(1, 4)), dp=draw(st.integers(1, 3)), laps=draw(st.integers(1, 3))
    )
    microbatches, training = draw(st.integers(1, 4 if topology.dp == 1 else 2)), draw(st.booleans())
    random = draw(st.randoms(use_true_random=False))
    chunks, replicas = range(topology.num_chunks), range(topology.dp)
    kinds = (Kind.F, Kind.B) if training else (Kind.F,)
    left = {
        (Action(c, k, m), r) for c in chunks for k in kinds for m in range(microbatches) for r in replicas
    }
    if training and topology.dp > 1:
        left |= {(Action(chunk, Kind.REDUCE_GRAD), None) for chunk in chunks}
    rows: dict[Node, list[Action]] = {node: [] for node in topology.nodes}
    while left:
        possible = [
            item for item in left if not any(need in left for need in needs(topology, microbatches, *item))
        ]
        action, replica = random.choice(sorted(possible, key=str))
        for owner in replicas if replica is None else (replica,):
            rows[topology.node_at(action.chunk, owner)].append(action)
        left.remove((action, replica))
    return Plan(topology, microbatches, rows, None, training)


def needs(topology, microbatches, action, replica):
    chunk, kind, microbatch = action
    if kind is Kind.F:
        return [(Action(chunk - 1, Kind.F, microbatch), replica)]
    if kind is Kind.B:
        return [
            (Action(chunk, Kind.F, microbatch), replica),
            (Action(chunk + 1, Kind.B, microbatch), replica),
        ]
    return [(Action(chunk, Kind.B, m), r) for m in range(microbatches) for r in range(topology.dp)]


@settings(max_examples=200)
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
    """The edge sends all its forwards before it takes one back: the cloud's results must be waited for meanwhile."""
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


def test_compute_rows_that_cannot_work_are_refused():
    topology = Topology([1])
    plan = Plan(topology, 1, {Node(0, 0): [Action(1, Kind.F, 0), Action(0, Kind.F, 0)]}, training=False)
    with pytest.raises(PlanError, match="has 1F0 before 0F0, which it needs"):
        add_communication(plan, "dedicated")
