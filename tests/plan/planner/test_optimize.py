"""The planner: every plan is proven, never longer than the fixed order, within its memory, and deterministic."""

import itertools
from dataclasses import replace

import pytest
from brute_force import works
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import topologies

from ldt.errors import PlanError
from ldt.plan import (
    Costs,
    Kind,
    Plan,
    buffers_needed,
    critical_path,
    lower_bound,
    optimize,
    simulate,
    ushape,
    verify,
)
from ldt.plan.planner import policy_search
from ldt.topology import Node, Topology


@st.composite
def tasks(draw, max_laps=3, max_dp=1, max_served=2, placed=True):
    """Draw a topology, a number of microbatches, and costs in which every chunk, hop and node differs."""
    topology = draw(topologies(1, 5, max_laps, max_dp, max_served, placed=placed))

    def figures(count, least, most):
        return draw(st.lists(st.floats(least, most), min_size=count, max_size=count))

    chunks, hops = topology.num_chunks, topology.num_chunks - 1
    costs = Costs(
        figures(chunks, 0.1, 2),
        figures(chunks, 0.1, 4),
        latency=figures(hops, 0, 4),
        bandwidth=draw(st.sampled_from([None, 1.0])),
        bytes=figures(hops, 0, 1),
        speed=dict(zip(topology.nodes, figures(len(topology.nodes), 0.8, 1.2), strict=True)),
        activation_bytes=figures(chunks, 1, 9),
    )
    return topology, draw(st.integers(1, 12)), costs


OPTIONS = st.fixed_dictionaries(
    {
        "lanes": st.sampled_from(["dedicated", "paired"]),
        "receive_buffers": st.sampled_from([None, 1, 2, 4]),
        "split_backward": st.booleans(),
    }
)


def quick_plan(*task, **options):
    """``optimize`` with a tenth of its trials: for what holds of every plan, the best one or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_search, "_BUDGET", policy_search._BUDGET // 10)
        return optimize(*task, **options)


@given(tasks(max_dp=2), OPTIONS)
def test_every_plan_is_proven_and_round_trips(task, options):
    plan = quick_plan(*task, **options)
    verify(plan)
    assert Plan.from_text(plan.to_text()) == plan
    topology, microbatches, costs = task
    bound = lower_bound(topology, microbatches, costs, split_backward=options["split_backward"])
    assert bound <= simulate(plan, costs).makespan * (1 + 1e-9)


@given(tasks(), OPTIONS)
def test_a_second_verifier_agrees(task, options):
    plan = quick_plan(*task, **(options | {"split_backward": False}))
    assert works(plan, options["lanes"])


@given(tasks(max_laps=2, max_dp=2, placed=False), OPTIONS)
def test_never_longer_than_the_fixed_order(task, options):
    topology, microbatches, costs = task
    buffers = options["receive_buffers"] or 2
    fixed = ushape(topology, microbatches, lanes=options["lanes"], receive_buffers=buffers)
    planned = simulate(quick_plan(*task, **options), costs).makespan
    assert planned <= simulate(fixed, costs).makespan * (1 + 1e-9)


@given(tasks(max_laps=2), OPTIONS)
def test_splitting_never_makes_it_longer(task, options):
    whole, split = (
        simulate(quick_plan(*task, **(options | {"split_backward": split})), task[2]).makespan
        for split in (False, True)
    )
    assert split <= whole * (1 + 1e-9)


@given(tasks(), OPTIONS, st.integers(0, 4))
def test_live_microbatches_stay_within_their_limit(task, options, more):
    topology, _, costs = task
    limit = [len(topology.chunks_of(stage)) + more for stage in range(topology.num_stages)]
    plan = quick_plan(*task, memory_limit=limit, **options)
    verify(plan)
    for node, peak in simulate(plan, costs).peak_live.items():
        assert peak <= limit[node.stage]


@given(tasks(), OPTIONS, st.floats(1, 3))
def test_bytes_stay_within_their_limit(task, options, times):
    topology, _, costs = task
    least = [sum(map(costs.activation, topology.chunks_of(s))) for s in range(topology.num_stages)]
    limit = [times * number for number in least]
    plan = quick_plan(*task, memory_limit_bytes=limit, **options)
    for node, peak in simulate(plan, costs).peak_bytes(costs).items():
        assert peak <= limit[node.stage] * (1 + 1e-9)


@given(tasks(max_laps=2), OPTIONS)
def test_the_same_each_time(task, options):
    assert quick_plan(*task, **options) == quick_plan(*task, **options)


@given(tasks(max_dp=2), st.booleans())
def test_a_critical_path_leads_from_start_to_end(task, split):
    timeline = simulate(quick_plan(*task, split_backward=split), task[2])
    path = critical_path(timeline)
    assert path[0].start == pytest.approx(timeline.start)
    assert path[-1].end == timeline.end
    for one, other in itertools.pairwise(path):
        assert one.start <= other.start
        same_link = one.channel is not None and other.channel is not None
        assert same_link or one.end == pytest.approx(other.start)


@given(
    stages=st.integers(2, 3),
    dp=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    number=st.integers(1, 7),
    figures=st.lists(st.sampled_from([0, 1]), min_size=10, max_size=10),
)
@example(stages=2, dp=(4, 2), number=2, figures=[0, 0, 0, 0, 1, 0, 0, 0, 1, 1])
def test_a_critical_path_begins_at_the_start_whatever_takes_no_time(stages, dp, number, figures):
    topology = Topology([1] * stages, dp=dp[0], edge_dp=dp[1])
    chunks = topology.num_chunks
    costs = Costs(
        figures[:chunks], figures[4 : 4 + chunks], latency=figures[8], bandwidth=1.0, bytes=figures[9]
    )
    timeline = simulate(ushape(topology, number), costs)
    path = critical_path(timeline)
    assert path[0].start == timeline.start
    assert path[-1].end == timeline.end


def test_a_critical_path_by_hand():
    topology = Topology([1, 1])
    timeline = simulate(ushape(topology, 2), Costs(forward=[1, 5, 1], backward=[2, 1, 2], latency=1))
    path = "0F0 0SEND_F0 1F0 1F1 1SEND_F1 2F1 2B1 2SEND_B1 1B1 1SEND_B1 0B1"
    assert " ".join(str(event.action) for event in critical_path(timeline)) == path


LINKED = Costs(forward=1, backward=2, latency=2, activation_bytes=100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": 2}, "memory_limit=2 is too small for one microbatch at a time: .* works is 3"),
        ({"memory_limit": [3, 1]}, r"the smallest that works is \[3\.?0?, 2\.?0?\]"),
        (
            {"memory_limit_bytes": 250},
            "memory_limit_bytes=250 is too small .* the smallest that works is 300",
        ),
        (
            {"memory_limit": [3, 2, 2]},
            "memory_limit must be a number from 0 on, or one for each of the 2 stages",
        ),
        ({"memory_limit": float("nan")}, "memory_limit must be a number from 0 on"),
        (
            {"memory_limit": "3"},
            "memory_limit must be a number from 0 on, or one for each of the 2 stages, got '3'",
        ),
        ({"memory_limit": 3, "memory_limit_bytes": 300}, "not both"),
        ({"receive_buffers": 0}, "receive_buffers must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, message):
    with pytest.raises(PlanError, match=message):
        optimize(Topology([1, 1], laps=2), 4, LINKED, **options)


def test_the_smallest_limits_work():
    topology = Topology([1, 1], laps=2)
    one_at_a_time = lower_bound(topology, 1, LINKED)
    for options in ({"memory_limit": 3}, {"memory_limit": [3, 2]}, {"memory_limit_bytes": 300}):
        timeline = simulate(optimize(topology, 4, LINKED, **options), LINKED)
        assert timeline.peak_live[Node(0, 0)] == 3
        assert timeline.makespan <= 4 * one_at_a_time


def test_bytes_need_costs_in_bytes():
    with pytest.raises(PlanError, match="needs costs with activation_bytes"):
        optimize(Topology([1, 1]), 2, Costs(forward=1, backward=2), memory_limit_bytes=10)


@pytest.mark.parametrize("laps", [1, 2])
@pytest.mark.parametrize("served", [2, 4])
def test_a_shared_edge_plays_all_its_replicas_at_once(served, laps):
    """Edge and cloud with equal work, or more on the edge: close to the bound, also with unequal shares."""
    topology = Topology([1, 1, 1], dp=served, edge_dp=1, laps=laps)
    for share, microbatches in ((0.5 / served, 8 * served), (0.25, 8 * served + 1)):
        shares = [share if topology.stage_of(c) == 0 else 1.0 for c in range(topology.num_chunks)]
        costs = Costs(shares, [2 * s for s in shares], latency=2)
        plan = optimize(topology, microbatches, costs)
        assert simulate(plan, costs).makespan <= 1.02 * lower_bound(topology, microbatches, costs)
        tight = optimize(topology, microbatches, costs, memory_limit=laps + 1)
        assert max(simulate(tight, costs).peak_live.values()) == laps + 1


def test_a_slow_link_gets_the_buffers_it_asks_for():
    topology = Topology([1, 1, 1])
    slow = Costs(forward=[0.25, 1, 1, 0.25], backward=[0.5, 2, 2, 0.5], latency=4)
    free, two = (optimize(topology, 32, slow, receive_buffers=buffers) for buffers in (None, 2))
    assert max(buffers_needed(free).values()) > 2 >= max(buffers_needed(two).values())
    assert simulate(free, slow).makespan < simulate(two, slow).makespan


def test_jitter_gets_room_and_takes_no_time_when_messages_are_punctual():
    topology = Topology([1, 1, 1])
    link = {"latency": [0.02, 0, 0.02], "bandwidth": 125e6, "bytes": [1 << 20, 0, 1 << 20]}
    costs = Costs([0.003, 0.012, 0.012, 0.003], [0.006, 0.024, 0.024, 0.006], **link)
    jittery = replace(costs, jitter=[0.05, 0, 0.05])
    late = jittery.with_every_message_late(topology)
    tight, roomy = optimize(topology, 32, costs), optimize(topology, 32, jittery)
    bound = lower_bound(topology, 32, costs)
    assert lower_bound(topology, 32, jittery) == bound
    assert simulate(roomy, jittery).makespan <= 1.001 * bound
    assert simulate(roomy, late).makespan <= 1.001 * lower_bound(topology, 32, late)
    assert simulate(tight, late).makespan > 1.5 * simulate(roomy, late).makespan
    limit = max(simulate(tight, costs).peak_live.values())
    limited = optimize(topology, 32, jittery, memory_limit=limit)
    assert max(simulate(limited, costs).peak_live.values()) <= limit


def test_weights_come_apart_only_if_asked_for():
    topology, kinds = Topology([1, 1]), {}
    for split in (False, True):
        plan = optimize(topology, 4, LINKED, split_backward=split)
        kinds[split] = {action.kind for row in plan.rows.values() for action in row}
    assert Kind.B in kinds[False]
    assert {Kind.I, Kind.W} <= kinds[True]


def test_three_laps_reach_the_bound():
    costs = Costs(forward=[0.25, 1, 1] * 3 + [0.25], backward=[0.5, 2, 2] * 3 + [0.5], latency=1)
    topology = Topology([1, 1, 1], laps=3)
    plan = optimize(topology, 16, costs)
    assert simulate(plan, costs).makespan <= 1.01 * lower_bound(topology, 16, costs)


def test_costs_of_nothing_have_a_plan():
    topology = Topology([1, 1, 1])
    plan = optimize(topology, 3, Costs(0, 0))
    verify(plan)
    assert simulate(plan, Costs(0, 0)).makespan == 0


@pytest.mark.parametrize("number", [1, 4, 8])
def test_backwards_that_are_dearer_in_two_parts_are_left_whole(number):
    topology = Topology([1, 1, 1])
    costs = Costs(1, 2, input=1.2, weight=1.2, latency=0.5)
    whole = simulate(optimize(topology, number, costs), costs).makespan
    assert simulate(optimize(topology, number, costs, split_backward=True), costs).makespan <= whole
