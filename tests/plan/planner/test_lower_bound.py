"""The bound: by hand, below the plans of all policies, and at most a solver's optimum."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver import solved
from strategies import any_compute_plan, costs_of, policies, topologies

from ldt.errors import PlanError
from ldt.plan import Costs, Kind, lower_bound, optimize, simulate, ushape
from ldt.plan.planner.list_scheduler import schedule
from ldt.plan.planner.lower_bound import replica_bound
from ldt.plan.planner.replica_costs import ReplicaCosts
from ldt.topology import Topology


def test_one_microbatch_is_the_critical_path():
    costs = Costs(forward=[1, 2, 3], backward=[4, 5, 6], latency=10)
    assert lower_bound(Topology([1, 1]), 1, costs) == 61


def test_the_busiest_node_by_hand():
    """Node 1 starts at 0.25 + 4, works 32 times 3, and the head's last backward ends 4 + 0.5 later."""
    costs = Costs(forward=[0.25, 1, 0.25], backward=[0.5, 2, 0.5], latency=4)
    assert lower_bound(Topology([1, 1]), 32, costs) == pytest.approx(4.25 + 96 + 4.5)


def test_a_split_backward_leaves_no_tail_behind_weights():
    costs = Costs(forward=[0.5, 1, 1, 0.25], backward=[1, 2, 2, 0.5], latency=5)
    topology = Topology([1, 1, 1])
    assert lower_bound(topology, 64, costs, split_backward=True) < lower_bound(topology, 64, costs)


def test_a_slow_link_bounds_the_step():
    """Each direction of the link carries 16 messages of 3 s, activations or gradients, per hop."""
    costs = Costs(forward=0.01, backward=0.01, bandwidth=1, bytes=3)
    assert lower_bound(Topology([1, 1]), 16, costs) > 2 * 16 * 3


def test_a_pipe_that_hops_share_bounds_the_step():
    """16 activations and 16 gradients of 3 s each go up, the first 1 s after the start; 12 s remain after the last."""
    costs = Costs(forward=1, backward=2, latency=1, bandwidth=1, bytes=[3, 0, 3])
    remain = 1 + 2 + 1 + 2 + (3 + 1) + 2
    assert lower_bound(Topology([1, 1, 1]), 16, costs) == pytest.approx(1 + 32 * 3 + remain)
    assert lower_bound(Topology([1, 1, 1], sites=[0, 1, 2]), 16, costs) < 1 + 32 * 3


def test_replicas_of_one_site_share_its_pipe():
    costs = Costs(forward=0.1, backward=0.1, bandwidth=1, bytes=1)
    for topology in (Topology([1, 1], dp=4), Topology([1, 1], dp=4, edge_dp=1)):
        messages = 2 * 8 * topology.edge_dp
        assert messages < lower_bound(topology, 8, costs) < messages + 4


def test_a_slow_replica_bounds_the_step():
    slow = Costs(forward=1, backward=2, speed={"1.1": 0.5})
    topology = Topology([1, 1], dp=2)
    assert lower_bound(topology, 8, slow) >= 8 * 6
    assert lower_bound(topology, 8, Costs(forward=1, backward=2)) < 8 * 6 + 10


def test_a_shared_edge_by_hand():
    """The edge's 16 microbatches of 1.5 s, or the cloud's 8 of 3 s after the other replica's first backward."""
    topology = Topology([1, 1], dp=2, edge_dp=1)
    assert lower_bound(topology, 16, Costs(forward=0.5, backward=[1, 0, 1])) == pytest.approx(16 * 3)
    cloud = Costs(forward=[0.125, 1, 0.125], backward=[0.25, 2, 0.25], latency=1)
    assert lower_bound(topology, 16, cloud) == pytest.approx(1.125 + 8 * 3 + 1.25 + 0.25)


def test_a_cloud_that_idles_because_its_pipe_is_slow_by_hand():
    """Two laps. The first backward of node 1 can start at 12 s; until then the pipe has brought 7 forwards of 1 s.

    At the end nothing remains but a message and the head's backward.
    """
    costs = Costs([0.5, 1] * 2 + [0.5], [1, 2] * 2 + [1], bandwidth=1, bytes=1.5)
    assert lower_bound(Topology([1, 1], laps=2), 32, costs) == pytest.approx(12 - 7 + 32 * 6 + 1.5 + 1)


def test_replicas_wait_for_each_other_on_a_pipe_by_hand():
    """Four nodes start when the pipe has brought their first activation, and end when it has their last gradient."""
    costs = Costs([1, 8, 1], [1, 8, 1], bandwidth=1, bytes=[2, 0])
    wait = (0 + 2 + 4 + 6) / 4
    assert lower_bound(Topology([1, 1], dp=4), 8, costs) == pytest.approx(
        1 + 2 + wait + 8 * 16 + wait + 2 + 1
    )


def test_what_cannot_be_bounded_is_refused():
    with pytest.raises(PlanError, match="num_microbatches must be an int of at least 1, got 0"):
        lower_bound(Topology([1, 1]), 0, Costs(forward=1, backward=2))
    with pytest.raises(PlanError, match="forward needs one number for each of the 3 chunks"):
        lower_bound(Topology([1, 1]), 1, Costs(forward=[1], backward=2))


@given(st.data(), topologies(1, 5, 3, max_edge_dp=1, placed=True), st.integers(1, 9), st.booleans())
def test_no_order_is_below_the_bound(data, topology, microbatches, split):
    replica_costs = ReplicaCosts.of(topology, data.draw(costs_of(topology)), split=split)
    makespan = schedule(
        replica_costs, microbatches, data.draw(policies(replica_costs, microbatches))
    ).makespan
    assert makespan < float("inf")
    assert replica_bound(replica_costs, microbatches) <= makespan * (1 + 1e-9) + 1e-12


@given(st.data(), topologies(1, 5), st.integers(1, 9))
def test_the_fixed_order_is_not_below_the_bound(data, topology, microbatches):
    costs = data.draw(costs_of(topology))
    timeline = simulate(ushape(topology, microbatches), costs)
    assert lower_bound(topology, microbatches, costs) <= (timeline.end + 1e-12) * (1 + 1e-9)


@given(st.data(), any_compute_plan().filter(lambda plan: plan.training), st.booleans())
def test_an_order_without_any_rule_is_not_below_the_bound(data, plan, split):
    """Nodes of any speeds, microbatches in any order: a shared edge need not serve its replicas in turn."""
    nodes = plan.topology.nodes
    speeds = data.draw(st.lists(st.floats(0.5, 2), min_size=len(nodes), max_size=len(nodes)))
    costs = replace(data.draw(costs_of(plan.topology)), speed=dict(zip(nodes, speeds, strict=True)))
    if split:
        rows = {node: [part for action in row for part in parts(action)] for node, row in plan.rows.items()}
        plan = plan.with_rows(rows, None)
    bound = lower_bound(plan.topology, plan.num_microbatches, costs, split_backward=split)
    assert bound <= (simulate(plan, costs).end + 1e-12) * (1 + 1e-9)


def parts(action):
    return [action._replace(kind=kind) for kind in (Kind.I, Kind.W)] if action.kind is Kind.B else [action]


@pytest.mark.parametrize(
    ("served", "laps", "microbatches", "forward", "backward", "latency"),
    [
        (1, 1, 5, [1, 3, 1], [2, 7, 2], 5),
        (1, 1, 6, [2, 3, 4, 2], [4, 5, 7, 3], [3, 0, 9]),
        (1, 2, 4, [1, 4, 2, 3, 1], [2, 6, 3, 8, 3], 4),
        (1, 2, 3, [2, 5, 5, 1, 4, 6, 2], [3, 9, 8, 2, 9, 11, 4], [6, 1, 6, 6, 1, 6]),
        (2, 1, 6, [1, 3, 1], [2, 7, 2], 5),
        (3, 1, 7, [2, 3, 4, 2], [4, 5, 7, 3], [3, 0, 9]),
        (2, 2, 4, [1, 4, 2, 3, 1], [2, 6, 3, 8, 3], 4),
    ],
)
def test_against_a_solver(served, laps, microbatches, forward, backward, latency):
    """The bound does not exceed the optimum, and the planner is within 1 % of it."""
    topology = Topology([1] * ((len(forward) - 1) // laps), dp=served, edge_dp=1, laps=laps)
    costs = Costs(forward, backward, latency=latency)
    _, found = solved(topology, microbatches, costs, seconds=8)
    assert lower_bound(topology, microbatches, costs) <= found
    assert simulate(optimize(topology, microbatches, costs), costs).makespan <= 1.01 * found


@pytest.mark.parametrize(
    ("topology", "microbatches", "forward", "backward", "latency", "size"),
    [
        (Topology([1, 1]), 4, [1, 3, 1], [2, 5, 2], 2, {"forward": 2, "backward": [1, 3]}),
        (Topology([1, 1, 1]), 4, [1, 3, 2, 1], [2, 5, 4, 2], [4, 0, 3], 4),
        (Topology([1, 1, 1]), 4, [1, 2, 2, 1], [2, 4, 4, 2], [5, 1, 5], [3, 1, 3]),
        (Topology([1, 1], laps=2), 3, [1, 4, 2, 3, 1], [2, 6, 3, 8, 3], 3, 3),
        (Topology([1, 1], dp=2, edge_dp=1), 4, [1, 3, 1], [2, 7, 2], 5, 2),
        (Topology([1, 1], dp=2), 2, [1, 3, 1], [2, 7, 2], 5, 2),
        (Topology([1, 1, 1]), 5, [2, 3, 3, 1], [4, 6, 6, 2], 0, [4, 0, 4]),
        (Topology([1, 1, 1], laps=2), 4, [2, 4, 2, 2, 4, 2, 1], [4, 8, 4, 4, 8, 4, 2], 0, [6, 0, 6] * 2),
        (Topology([1, 1], dp=2), 4, [2, 3, 2], [4, 6, 4], 0, 2),
        (Topology([1, 1, 1], dp=2, edge_dp=1), 10, [1, 3, 4, 1], [2, 6, 8, 2], 4, [3, 0, 3]),
    ],
)
def test_a_shared_pipe_against_a_solver(topology, microbatches, forward, backward, latency, size):
    """The solver may let messages wait for later ones, too. The planner is within 2 % of its proven optimum."""
    costs = Costs(forward, backward, latency=latency, bandwidth=1, bytes=size)
    least, found = solved(topology, microbatches, costs, seconds=60)
    assert lower_bound(topology, microbatches, costs) <= found
    assert least == found
    assert simulate(optimize(topology, microbatches, costs), costs).makespan <= 1.02 * found
