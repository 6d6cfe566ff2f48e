"""The scheduler's own clock agrees with the engine."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import costs_of, policies, topologies

from ldt.plan import (
    Action,
    Costs,
    Kind,
    Plan,
    add_communication,
    add_grad_reduction,
    buffers_needed,
    simulate,
)
from ldt.plan.planner.list_scheduler import schedule
from ldt.plan.planner.policy import Limits, Policy
from ldt.plan.planner.replica_costs import ReplicaCosts
from ldt.topology import Topology


def plan_of(topology, microbatches, scheduled):
    rows = {}
    for node in topology.nodes:
        share = topology.microbatches_of(node, microbatches)
        row = scheduled.row(node.stage, topology.turn_of(node))
        rows[node] = [Action(item.chunk, item.kind, share[item.microbatch]) for item in row]
    return add_grad_reduction(Plan(topology, microbatches, rows))


@given(st.data(), topologies(1, 5, 3, max_edge_dp=1, placed=True), st.integers(1, 8), st.booleans())
def test_its_times_are_those_of_the_simulator(data, topology, microbatches, split):
    costs = data.draw(costs_of(topology))
    pipes = [topology.pipe_of(channel) for channel in topology.channels]
    if len(set(pipes)) < len(pipes):  # simultaneous messages may take a pipe that they share in another order
        costs = replace(costs, bandwidth=None)
    replica_costs = ReplicaCosts.of(topology, costs, split=split)
    policy = data.draw(policies(replica_costs, microbatches, st.none()))
    scheduled = schedule(replica_costs, microbatches, policy)
    timeline = simulate(plan_of(topology, microbatches, scheduled), costs)
    assert timeline.end == pytest.approx(scheduled.makespan)
    if (
        min(replica_costs.forward + replica_costs.backward) > 0
    ):  # actions of zero duration are not visible on a timeline
        for stage, peak in enumerate(scheduled.peaks):
            assert peak == max(live for node, live in timeline.peak_live.items() if node.stage == stage)


@given(
    st.data(),
    topologies(2, 5, 3, max_edge_dp=1, placed=True),
    st.integers(1, 8),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_its_pipes_are_those_of_the_simulator(data, topology, microbatches, split, random):
    """Figures that no two sums of are equal, so no two messages become ready at one moment."""

    def figures(count, most):
        return [random.uniform(0.1, most) for _ in range(count)]

    chunks, hops = topology.num_chunks, topology.tail
    costs = Costs(
        figures(chunks, 2),
        figures(chunks, 4),
        latency=figures(hops, 5),
        bandwidth={"up": figures(hops, 2), "down": figures(hops, 2)},
        bytes={"forward": figures(hops, 2), "backward": figures(hops, 2)},
    )
    replica_costs = ReplicaCosts.of(topology, costs, split=split)
    scheduled = schedule(
        replica_costs, microbatches, data.draw(policies(replica_costs, microbatches, st.none()))
    )
    timeline = simulate(plan_of(topology, microbatches, scheduled), costs)
    assert timeline.end == pytest.approx(scheduled.makespan)


@given(st.data(), topologies(max_edge_dp=1, placed=True), st.integers(1, 8), st.integers(1, 3))
def test_receive_buffers_are_those_of_dedicated_lanes(data, topology, microbatches, buffers):
    costs = replace(data.draw(costs_of(topology)), bandwidth=None)
    replica_costs = ReplicaCosts.of(topology, costs)
    policy = data.draw(policies(replica_costs, microbatches, st.just(buffers)))
    scheduled = schedule(replica_costs, microbatches, policy)
    plan = add_communication(plan_of(topology, microbatches, scheduled), "dedicated", buffers, costs)
    assert all(needed <= buffers for needed in buffers_needed(plan).values())
    assert simulate(plan, costs).end == pytest.approx(scheduled.makespan)


def test_the_least_capacity_is_one_microbatch_at_a_time():
    topology = Topology([1, 1], laps=2)
    replica_costs = ReplicaCosts.of(topology, Costs(forward=1, backward=2, latency=1))
    forwards_first = tuple(
        tuple((c, kind) for kind in (Kind.F, Kind.B) for c in replica_costs.chunks_of(stage))
        for stage in (0, 1)
    )
    policy = Policy((5,) * 5, (True,) * 5, forwards_first, Limits(capacity=(3.0, 2.0)))
    scheduled = schedule(replica_costs, 5, policy)
    assert scheduled.peaks == [3, 2]
    assert scheduled.makespan <= 5 * replica_costs.critical_path
