"""What crosses between two sites in one direction takes turns on one pipe; within a site links are apart."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import any_compute_plan, costs_of, topologies

from ldt.plan import Costs, Plan, critical_path, lower_bound, optimize, simulate, ushape
from ldt.topology import Topology

WIDE_AREA = Costs(  # 200 Mb/s and 20 ms between the edge and the cloud, where the second hop is free
    [0.003, 0.012, 0.012, 0.003],
    [0.006, 0.024, 0.024, 0.006],
    latency=[0.02, 0, 0.02],
    bandwidth=[25e6, 1e18, 25e6],
    bytes=1 << 20,
)


def turns(timeline, costs):
    """Per pipe: when each message began and ended to occupy it, in order."""
    found = defaultdict(list)
    for event in timeline.transfers:
        channel = event.channel
        end = event.start + costs.occupancy(
            channel.hop, channel.direction, up=channel.source.stage < channel.target.stage
        )
        found[timeline.topology.pipe_of(channel)].append((event.start, end))
        assert event.end == pytest.approx(end + costs.delay(channel.hop))
    return {pipe: sorted(times) for pipe, times in found.items()}


@pytest.mark.parametrize(("laps", "dp", "edge_dp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 2, 2)])
def test_each_direction_is_one_pipe_for_all(laps, dp, edge_dp):
    """Of 6 microbatches of each edge replica: activations and gradients, of each lap."""
    topology = Topology([1, 1, 1], dp, edge_dp, laps)
    costs = Costs(0.1, 0.2, latency=7, bandwidth=1, bytes=1)
    found = turns(simulate(ushape(topology, 6), costs), costs)
    up, down = found.pop("0->1"), found.pop("1->0")
    assert len(up) == len(down) == 6 * 2 * laps * edge_dp
    for times in (up, down):
        assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(times))
    assert len(found) == 2 * dp
    assert all(pipe.startswith(("1.", "2.")) for pipe in found)


@given(st.data(), any_compute_plan())
def test_turns_never_overlap_and_latency_is_apart(data, plan):
    costs = data.draw(costs_of(plan.topology))
    for times in turns(simulate(plan, costs), costs).values():
        assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(times))


def test_first_ready_first_served():
    """The gradient becomes ready while the second activation is on the pipe, and goes before the third."""
    topology = Topology([1, 1, 1])
    costs = Costs(
        [0, 1, 1, 0], [1, 1, 1, 1], bandwidth=[1, 1e9, 1e9], bytes={"forward": [4, 0, 0], "backward": 0}
    )
    plan = ushape(topology, 3)
    order = [
        str(event.action) for event in simulate(plan, costs).transfers if event.channel.source.stage == 0
    ]
    assert order == ["0SEND_F0", "0SEND_F1", "3SEND_B0", "0SEND_F2", "3SEND_B1", "3SEND_B2"]


@given(topologies(2, 2, max_edge_dp=1, max_served=1), st.integers(1, 6), st.floats(0, 3))
def test_two_stages_are_two_sites_whatever_their_names(topology, microbatches, size):
    costs = Costs(1, 2, latency=1, bandwidth=1, bytes=size)
    plan = ushape(topology, microbatches)
    named = Topology(topology.tp, laps=topology.laps, sites=["office", "cloud"])
    assert (
        simulate(Plan(named, microbatches, plan.rows, plan.lanes), costs).events
        == simulate(plan, costs).events
    )


def test_each_pair_of_sites_has_pipes_of_its_own():
    apart, together = (Topology([1, 1, 1], sites=sites) for sites in ([0, 1, 2], None))
    costs = Costs(0.01, 0.02, bandwidth=1, bytes=1)
    plans = [ushape(topology, 8) for topology in (apart, together)]
    assert len({apart.pipe_of(channel) for channel in apart.channels}) == 6
    assert simulate(plans[0], costs).makespan < 0.85 * simulate(plans[1], costs).makespan


def test_directions_may_differ():
    costs = Costs(
        1, 1, latency=1, bandwidth={"up": 10, "down": [5, 2]}, bytes={"forward": 40, "backward": [20, 60]}
    )
    transfers = simulate(ushape(Topology([1, 1]), 1), costs).transfers
    assert {str(e.action): e.end - e.start for e in transfers} == {
        "0SEND_F0": 5,
        "1SEND_F0": 21,
        "2SEND_B0": 7,
        "1SEND_B0": 5,
    }


def test_a_shared_pipe_over_a_wide_area_link():
    """Each pipe carries 64 messages of 1 MiB, 2,684 ms; with a link for each hop they would take half of that."""
    shared, apart = Topology([1, 1, 1]), Topology([1, 1, 1], sites=[0, 1, 2])
    plan = optimize(apart, 32, WIDE_AREA)
    assert simulate(plan, WIDE_AREA).makespan == pytest.approx(1.646, abs=5e-4)
    there = Plan(shared, 32, plan.rows, plan.lanes)
    assert simulate(there, WIDE_AREA).makespan == pytest.approx(2.841, abs=5e-4)
    fitted, bound = simulate(optimize(shared, 32, WIDE_AREA), WIDE_AREA), lower_bound(shared, 32, WIDE_AREA)
    assert 64 * 2**20 / 25e6 < bound <= fitted.makespan <= 1.01 * bound
    path = critical_path(fitted)
    assert path[0].start == 0
    assert path[-1].end == fitted.end
