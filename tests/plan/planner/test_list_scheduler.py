"""The scheduler's own clock: what it plays is what the engine runs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import costs_of, rules_of, topologies

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
from ldt.plan.planner.policy import Limits, Rules
from ldt.plan.planner.replica_costs import Chain
from ldt.topology import Topology


def plan_of(topology, microbatches, played):
    rows = {}
    for node in topology.nodes:
        share = topology.microbatches_of(node, microbatches)
        row = played.row(node.stage, topology.turn_of(node))
        rows[node] = [Action(taken.chunk, taken.kind, share[taken.microbatch]) for taken in row]
    return add_grad_reduction(Plan(topology, microbatches, rows))


@given(st.data(), topologies(1, 5, 3, max_edge_dp=1), st.integers(1, 8), st.booleans())
def test_its_times_are_the_simulated_ones(data, topology, microbatches, split):
    costs = data.draw(costs_of(topology))
    if (
        topology.laps > 1 or topology.num_stages == 2
    ):  # channels share links: messages of one moment may take them in another order
        costs = replace(costs, bandwidth=None)
    chain = Chain.of(topology, costs, split=split)
    rules = data.draw(rules_of(chain, microbatches, st.none()))
    played = schedule(chain, microbatches, rules)
    timeline = simulate(plan_of(topology, microbatches, played), costs)
    assert timeline.end == pytest.approx(played.makespan)
    if min(chain.forward + chain.backward) > 0:  # what lasts no time is not seen on a timeline
        for stage, peak in enumerate(played.peaks):
            assert peak == max(live for node, live in timeline.peak_live.items() if node.stage == stage)


@given(st.data(), topologies(max_edge_dp=1), st.integers(1, 8), st.integers(1, 3))
def test_receive_buffers_are_those_of_dedicated_lanes(data, topology, microbatches, buffers):
    costs = replace(data.draw(costs_of(topology)), bandwidth=None)
    chain = Chain.of(topology, costs)
    rules = data.draw(rules_of(chain, microbatches, st.just(buffers)))
    played = schedule(chain, microbatches, rules)
    plan = add_communication(plan_of(topology, microbatches, played), "dedicated", buffers, costs)
    assert all(needed <= buffers for needed in buffers_needed(plan).values())
    assert simulate(plan, costs).end == pytest.approx(played.makespan)


def test_the_least_capacity_is_one_microbatch_at_a_time():
    topology = Topology([1, 1], laps=2)
    chain = Chain.of(topology, Costs(forward=1, backward=2, latency=1))
    forwards_first = tuple(
        tuple((c, kind) for kind in (Kind.F, Kind.B) for c in chain.chunks_of(stage)) for stage in (0, 1)
    )
    rules = Rules((5,) * 5, (True,) * 5, forwards_first, Limits(capacity=(3.0, 2.0)))
    played = schedule(chain, 5, rules)
    assert played.peaks == [3, 2]
    assert played.makespan <= 5 * chain.critical_path
