"""Simulated times: by hand for small cases, and the rules of links."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ldt.errors import PlanError
from ldt.plan import Action, Costs, Plan, add_communication, remove_communication, simulate, ushape
from ldt.topology import Node, Topology

EDGE, CLOUD = Node(0, 0), Node(1, 0)


def forward_plan(microbatches, lanes="dedicated", receive_buffers=9):
    """The edge runs all heads first, then all tails; the cloud runs one microbatch after the other."""
    heads, middles, tails = (
        [Action.parse(f"{chunk}F{m}") for m in range(microbatches)] for chunk in range(3)
    )
    plan = Plan(Topology([1, 1]), microbatches, {EDGE: heads + tails, CLOUD: middles}, training=False)
    return add_communication(plan, lanes, receive_buffers)


def times(timeline, text):
    return next((e.start, e.end) for e in timeline.events if str(e.action) == text)


def test_one_microbatch_walks_through():
    timeline = simulate(ushape(Topology([1, 1]), 1), Costs(forward=[1, 2, 3], backward=[4, 5, 6], latency=10))
    ends = {str(event.action): (event.start, event.end) for event in timeline.events}
    assert ends == {
        "0F0": (0, 1),
        "0SEND_F0": (1, 11),
        "1F0": (11, 13),
        "1SEND_F0": (13, 23),
        "2F0": (23, 26),
        "2B0": (26, 32),
        "2SEND_B0": (32, 42),
        "1B0": (42, 47),
        "1SEND_B0": (47, 57),
        "0B0": (57, 61),
    }
    assert timeline.makespan == 61
    assert timeline.busy == {EDGE: 14, CLOUD: 7}
    assert timeline.bubble == pytest.approx(1 - (14 + 7) / (2 * 61))
    assert timeline.peak_live == {EDGE: 2, CLOUD: 1}
    assert len(timeline.transfers) == 4
    assert timeline.transfers[0].channel == timeline.topology.channel(0, "F", 0)


def test_latencies_of_messages_overlap():
    timeline = simulate(forward_plan(3), Costs(forward=1, backward=0, latency=[10, 0]))
    assert [times(timeline, f"1F{m}") for m in range(3)] == [(11, 12), (12, 13), (13, 14)]


def test_bytes_take_turns_on_the_link():
    """A message of 40 bytes at 10 bytes/s occupies its direction for 4 s, and arrives 3 s later."""
    costs = Costs(forward=1, backward=0, latency=3, bandwidth=[10, 1e9], bytes=[40, 1])
    timeline = simulate(forward_plan(3), costs)
    assert [times(timeline, f"0SEND_F{m}") for m in range(3)] == [(1, 8), (5, 12), (9, 16)]
    assert [times(timeline, f"1F{m}")[0] for m in range(3)] == [8, 12, 16]


def test_directions_of_a_link_do_not_share():
    both_ways = Costs(forward=1, backward=0, bandwidth=10, bytes=[40, 40])
    one_way = Costs(forward=1, backward=0, bandwidth=[10, 1e9], bytes=[40, 0])
    fast, slow = (simulate(forward_plan(4), costs) for costs in (one_way, both_ways))
    assert [times(slow, f"1F{m}") for m in range(4)] == [times(fast, f"1F{m}") for m in range(4)]
    assert slow.makespan == fast.makespan + 4


def test_channels_between_two_nodes_share_their_direction():
    """In training with two stages, activations of chunk 0 and gradients of chunk 2 have the same direction."""
    costs = Costs(forward=1, backward=1, bandwidth=1, bytes=5)
    timeline = simulate(ushape(Topology([1, 1]), 6), costs)
    upwards = sorted((e.start, e.end) for e in timeline.transfers if e.node == EDGE)
    assert len(upwards) == 12
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(upwards))


def test_one_buffer_makes_the_sender_wait():
    """With one receive buffer, the next message is received only after the previous one was used."""
    cloud = "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1"
    plan = forward_plan(2)
    plan = plan.with_rows({**plan.rows, CLOUD: [Action.parse(text) for text in cloud.split()]}, "dedicated")
    timeline = simulate(plan, Costs(forward=[1, 5, 1], backward=0, latency=10))
    assert times(timeline, "0SEND_F1") == (16, 26)
    assert (
        simulate(forward_plan(2), Costs(forward=[1, 5, 1], backward=0, latency=10)).makespan
        < timeline.makespan
    )


def test_split_backward_costs():
    costs = Costs(forward=1, backward=[4, 6], weight=[1, 2])
    assert [costs.compute(Action.parse(text)) for text in ("0B0", "0I0", "0W0", "1I0", "0REDUCE_GRAD")] == [
        4,
        3,
        1,
        4,
        0,
    ]
    assert Costs(forward=1, backward=4).compute(Action.parse("0W0")) == 2


@given(
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from(["dedicated", "paired"]),
    st.floats(0, 5),
    st.floats(0, 3),
)
def test_a_worse_link_never_helps_and_work_is_kept(
    stages, laps, microbatches, training, policy, latency, size
):
    plan = ushape(Topology([1] * stages, laps=laps), microbatches, training=training, lanes=policy)
    ideal = simulate(remove_communication(plan), Costs(forward=1, backward=2))
    linked = simulate(plan, Costs(forward=1, backward=2, latency=latency, bandwidth=1, bytes=size))
    assert linked.busy == pytest.approx(ideal.busy)
    assert linked.makespan >= ideal.makespan - 1e-9
    assert 0 <= ideal.bubble <= linked.bubble + 1e-9 < 1
    assert {str(e.action) for e in linked.compute} == {str(e.action) for e in ideal.compute}
    assert len(linked.transfers) == len(ideal.transfers)
    for event in linked.transfers:
        assert event.end - event.start == pytest.approx(latency + size)


def test_simulation_is_deterministic():
    plan = ushape(Topology([1, 1, 1], laps=2), 6, lanes="paired")
    costs = Costs(forward=0.1, backward=0.2, latency=0.05, bandwidth=7, bytes=1)
    assert simulate(plan, costs) == simulate(plan, costs)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=[1, 1], backward=1), "forward needs one number for each of the 3 chunks, got 2"),
        (Costs(forward=1, backward=1, latency=[1]), "latency needs one number for each of the 2 hops, got 1"),
        (Costs(forward=1, backward=-1), "backward must be at least 0 and finite, got -1"),
        (Costs(forward=1, backward=1, bandwidth=0, bytes=1), "bandwidth must be above 0 and finite, got 0"),
        (Costs(forward=float("nan"), backward=1), "forward must be at least 0 and finite, got nan"),
    ],
)
def test_costs_that_do_not_fit_are_refused(costs, message):
    with pytest.raises(PlanError, match=message):
        simulate(ushape(Topology([1, 1]), 1), costs)


def test_a_plan_that_cannot_run_is_refused():
    plan = ushape(Topology([1, 1]), 2)
    rows = {**plan.rows, CLOUD: plan.rows[CLOUD][:-1]}
    with pytest.raises(PlanError, match=r"node 1\.0 lacks 1SEND_B1"):
        simulate(plan.with_rows(rows, "dedicated"), Costs(forward=1, backward=1))


def test_the_busy_share_of_each_node():
    """By hand: the edge computes during 3 of 9, the cloud during 6."""
    timeline = simulate(
        ushape(Topology([1, 1]), 1), Costs(forward=[0.5, 2, 0.5], backward=[1, 4, 1], latency=0)
    )
    assert timeline.makespan == 9
    assert {str(node): share for node, share in timeline.busy_share.items()} == {"0.0": 3 / 9, "1.0": 6 / 9}
    assert timeline.bubble == pytest.approx(1 - sum(timeline.busy_share.values()) / 2)
