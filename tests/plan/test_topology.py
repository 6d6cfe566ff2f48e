"""Topologies: ranks, chunks, channels, colors of lanes, text, and errors."""

import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import placements

from ldt.errors import LdtError, TopologyError
from ldt.topology import Channel, Node, Topology, lanes

SITES = st.integers(1, 999_999) | st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,31}", fullmatch=True)


@st.composite
def any_topology(draw):
    tp = draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))
    edge_dp, times, laps = (draw(st.integers(1, 3)) for _ in range(3))
    cloud = draw(st.lists(SITES, min_size=len(tp) - 1, max_size=len(tp) - 1))
    sites = draw(st.sampled_from([None, [0, *cloud]]))
    if draw(st.booleans()):
        placement = draw(placements(len(tp)))
        return Topology(
            tp, edge_dp * (times if len(tp) > 1 else 1), edge_dp, sites=sites, placement=placement
        )
    return Topology(tp, edge_dp * (times if len(tp) > 1 else 1), edge_dp, laps, sites)


topologies = any_topology()


def test_import_needs_no_torch():
    code = (
        "import sys, ldt.plan, ldt.topology; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_u_shape_of_three_stages():
    topology = Topology(tp=[1, 2, 2], laps=1)
    assert (topology.num_stages, topology.num_chunks, topology.tail, topology.world_size) == (3, 4, 3, 5)
    assert topology.chunks_of(0) == (0, 3)
    assert topology.chunks_of(2) == (2,)
    assert topology.ranks_of(Node(1, 0)) == (1, 2)
    assert topology.leader_of(Node(2, 0)) == 3
    assert topology.tp_rank_of(4) == 1
    assert topology.edge_dp == 1


def test_two_laps_come_back_to_every_stage():
    topology = Topology([1, 1], laps=2)
    assert [topology.stage_of(chunk) for chunk in range(topology.num_chunks)] == [0, 1, 0, 1, 0]
    assert topology.chunks_of(0) == (0, 2, 4)


def test_one_stage_has_only_local_hops():
    topology = Topology([3], laps=2)
    assert topology.channels == ()
    assert not any(topology.crosses(hop) for hop in range(-1, topology.num_chunks))
    assert topology.chunks_of(0) == (0, 1, 2)


def test_channels_of_two_stages_share_both_directions():
    names = [channel.name for channel in Topology([1, 1]).channels]
    assert names == ["F0:0.0->1.0", "B0:1.0->0.0", "F1:1.0->0.0", "B1:0.0->1.0"]


def test_edge_replica_serves_several_cloud_replicas():
    topology = Topology([1, 1], dp=4, edge_dp=2)
    assert topology.replicas(0) == 2
    assert topology.replicas(1) == 4
    assert topology.world_size == 6
    assert topology.channel(0, "F", 3) == Channel(Node(0, 1), Node(1, 3), 0, "F")
    assert {channel.replica for channel in topology.channels} == {0, 1, 2, 3}
    assert len(set(topology.channels)) == len(topology.channels) == 16


def test_microbatches_are_dealt_in_turn():
    topology = Topology([1, 1], dp=6, edge_dp=2)
    assert topology.served == 3
    assert [topology.cloud_replica(Node(0, 1), microbatch) for microbatch in range(5)] == [1, 3, 5, 1, 3]
    assert [list(topology.microbatches_of(node, 5)) for node in topology.nodes if node.replica % 2] == [
        [0, 1, 2, 3, 4],
        [0, 3],
        [1, 4],
        [2],
    ]
    assert list(topology.microbatches_of(Node(1, 4), 2)) == []


@given(topologies, st.integers(1, 9))
def test_each_microbatch_is_one_cloud_replicas(topology, microbatches):
    """Both spellings are equivalent, on every stage and for every edge replica."""
    for stage in range(1, topology.num_stages):
        nodes = [node for node in topology.nodes if node.stage == stage]
        dealt = [
            (replica, m)
            for edge in topology.nodes[: topology.edge_dp]
            for m in range(microbatches)
            for replica in [topology.cloud_replica(edge, m)]
        ]
        has = [(node.replica, m) for node in nodes for m in topology.microbatches_of(node, microbatches)]
        assert sorted(dealt) == sorted(has)
        assert all(topology.cloud_replica(node, 7) == node.replica for node in nodes)
    for edge in topology.nodes[: topology.edge_dp]:
        assert list(topology.microbatches_of(edge, microbatches)) == list(range(microbatches))
        assert all(topology.node_at(0, replica) == edge for replica in topology.cloud_replicas(edge))


@given(topologies)
def test_hops_that_cross_have_channels_and_no_others(topology):
    assert {channel.hop for channel in topology.channels} == {
        hop for hop in range(-2, topology.num_chunks + 2) if topology.crosses(hop)
    }


@given(topologies)
def test_ranks_are_numbered_node_by_node(topology):
    ranks = [rank for node in topology.nodes for rank in topology.ranks_of(node)]
    assert ranks == list(range(topology.world_size))
    assert all(topology.node_of(rank) == node for node in topology.nodes for rank in topology.ranks_of(node))
    assert list(topology.nodes) == sorted(topology.nodes)


@given(topologies)
def test_text_and_pickle_round_trip(topology):
    assert Topology.from_text(topology.to_text()) == topology
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert hash(Topology.from_text(topology.to_text())) == hash(topology)


@given(topologies, st.sampled_from(["dedicated", "paired"]))
def test_a_node_is_on_a_lane_as_sender_or_as_receiver(topology, policy):
    lane_of = lanes(topology, policy)
    assert set(lane_of) == set(topology.channels)
    senders = {(lane, channel.source) for channel, lane in lane_of.items()}
    receivers = {(lane, channel.target) for channel, lane in lane_of.items()}
    assert not senders & receivers
    if policy == "dedicated":
        assert len(set(lane_of.values())) == len(topology.channels)


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
def test_paired_colours(stages):
    colours: dict[str, set[tuple[int, int, str]]] = {}
    for channel, lane in lanes(Topology([1] * stages), "paired").items():
        ends = (channel.source.stage, channel.target.stage, channel.direction)
        colours.setdefault(lane.colour, set()).add(ends)
    if stages % 2:
        assert colours.pop("last_to_first") == {(stages - 1, 0, "F")}
        assert colours.pop("first_to_last") == {(0, stages - 1, "B")}
    assert set(colours) == {"ping", "pang"}
    assert all(source % 2 == 0 and target % 2 == 1 for source, target, _ in colours["pang"])
    assert all(source % 2 == 1 and target % 2 == 0 for source, target, _ in colours["ping"])


def test_the_edge_is_one_site_and_the_cloud_another():
    topology = Topology([1, 2, 2])
    assert topology.sites == (0, 1, 1)
    assert topology == Topology([1, 2, 2], sites=[0, 1, 1])
    assert topology.to_text() == "tp=1,2,2 dp=1 edge_dp=1 laps=1"
    assert Topology([1]).sites == (0,)


def test_other_sites_are_distinct():
    one, other = (Topology([1, 1, 1], sites=sites) for sites in (["office", 1, "b.2"], [0, 1, 2]))
    assert one.to_text() == "tp=1,1,1 dp=1 edge_dp=1 laps=1 sites=office,1,b.2"
    assert len({one, other, Topology([1, 1, 1])}) == 3
    assert "sites=('office', 1, 'b.2')" in repr(one)
    assert Topology.from_text(one.to_text()) == one


def test_a_pipe_is_shared_by_all_replicas_and_a_link_within_a_site_is_not():
    topology = Topology([1, 1, 1], dp=2, laps=2, sites=["office", "cloud", "cloud"])
    pipes = {channel.name: topology.pipe_of(channel) for channel in topology.channels}
    assert pipes["F0:0.0->1.0"] == pipes["F3:0.1->1.1"] == pipes["B2:0.1->2.1"] == "office->cloud"
    assert pipes["F2:2.0->0.0"] == pipes["B0:1.1->0.1"] == "cloud->office"
    assert pipes["F1:1.0->2.0"] == pipes["F4:1.0->2.0"] == "1.0->2.0"
    assert pipes["B1:2.1->1.1"] == "2.1->1.1"


def test_describe_names_every_node():
    shared = Topology([1, 2], dp=2, edge_dp=1).describe().splitlines()
    assert shared[-2:] == [
        "replica 0: 0.0 [0] -> 1.0 [1-2] -> 0.0 [0]",
        "replica 1: 0.0 [0] -> 1.1 [3-4] -> 0.0 [0]",
    ]
    text = Topology([1, 2], dp=2).describe()
    assert "1.1     4-5             1" in text
    assert "0.0     0               0, 2" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": []}, "tp is empty"),
        ({"tp": [1, 0]}, r"tp\[1\] must be a whole number of at least 1, got 0"),
        ({"tp": [1, True]}, r"tp\[1\] must be .* got True"),
        ({"tp": [1, 1], "dp": 0}, "dp must be .* got 0"),
        ({"tp": [1, 1], "laps": 1.5}, "laps must be .* got 1.5"),
        ({"tp": [1, 1], "dp": 4, "edge_dp": 3}, "edge_dp=3 does not divide dp=4"),
        ({"tp": [1], "dp": 2, "edge_dp": 1}, "one stage has no cloud"),
        (
            {"tp": [1, 1], "placement": [0, 1, 2, 0]},
            r"placement must begin and end with stage 0.* there is no stage 2",
        ),
        ({"tp": [1, 1], "placement": [0, 1, True, 0]}, r"placement must .* there is no stage True"),
        ({"tp": [1, 1], "placement": [0, 1, -1, 0]}, r"placement must .* there is no stage -1"),
        ({"tp": [1, 1], "placement": "0110"}, r"placement must be a sequence of stages, .*: got '0110'"),
        ({"tp": [1, 1], "placement": 2}, r"placement must be a sequence of stages, .*: got 2"),
        ({"tp": [1, 1], "placement": []}, r"placement must begin and end with stage 0.*\[0, 1, 1, 0\]"),
        ({"tp": [1, 1], "placement": [0]}, r"placement must begin and end with stage 0"),
        ({"tp": [1], "placement": [0]}, r"placement must .* and have at least two chunks"),
        ({"tp": [1, 1], "placement": [0, 1]}, r"placement must begin and end with stage 0"),
        ({"tp": [1, 1], "placement": [1, 0]}, r"placement must begin and end with stage 0"),
        ({"tp": [1, 1, 1], "placement": [0, 1, 1, 0]}, r"placement must .* there is no chunk on stage 2"),
        (
            {"tp": [1, 1], "laps": 2, "placement": [0, 1, 1, 0]},
            r"laps=2 does not fit placement=\[0, 1, 1, 0\], which has 2 chunks on the edge",
        ),
        ({"tp": [1, 1], "placement": [0] + [1] * 100_000 + [0]}, "at most .* 100000 chunks"),
        ({"tp": [1, 1], "sites": [0]}, r"sites needs the site of each of the 2 stages, .*: got \[0\]"),
        ({"tp": [1, 1], "sites": "ab"}, "sites needs the site of each of the 2 stages, .* got 'ab'"),
        ({"tp": [1, 1], "sites": 1}, "sites needs the site of each of the 2 stages, .* got 1"),
        (
            {"tp": [1, 1, 1], "sites": [0, 1, 0]},
            r"sites\[2\] is that of stage 0, 0: the edge needs a site of its own",
        ),
        ({"tp": [1, 1], "sites": ["a", "a"]}, r"sites\[1\] is that of stage 0, 'a'"),
        (
            {"tp": [1, 1], "sites": [0, True]},
            r"sites\[1\] must be a number from 0 to 999999 or a name .* got True",
        ),
        ({"tp": [1, 1], "sites": [0, -1]}, r"sites\[1\] must be .* got -1"),
        ({"tp": [1, 1], "sites": [0, 10**6]}, r"sites\[1\] must be .* got 1000000"),
        ({"tp": [1, 1], "sites": [0, 1.5]}, r"sites\[1\] must be .* got 1.5"),
        ({"tp": [1, 1], "sites": [0, None]}, r"sites\[1\] must be .* got None"),
        ({"tp": [1, 1], "sites": [0, "a,b"]}, r"sites\[1\] must be .* got 'a,b'"),
        ({"tp": [1, 1], "sites": [0, ""]}, r"sites\[1\] must be .* got ''"),
        ({"tp": [1, 1], "sites": [0, "x" * 33]}, r"sites\[1\] must be .* up to 32"),
        ({"tp": [1, 1], "sites": ["0", 1]}, r"sites\[0\] must be .*, got the text '0': give 0"),
    ],
)
def test_impossible_topologies_are_refused(arguments, message):
    with pytest.raises(TopologyError, match=message):
        Topology(**arguments)


def test_placement_of_a_v():
    topology = Topology([1, 2, 1], placement=[0, 1, 2, 2, 1, 0])
    assert (topology.num_chunks, topology.laps, topology.is_looped) == (6, 1, False)
    assert [topology.chunks_of(stage) for stage in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [topology.crosses(hop) for hop in range(5)] == [True, True, False, True, True]
    assert topology.to_text() == "tp=1,2,1 dp=1 edge_dp=1 laps=1 placement=0,1,2,2,1,0"


def test_a_placement_in_laps_is_the_same_topology():
    assert Topology([1, 1], placement=[0, 1, 0, 1, 0]) == Topology([1, 1], laps=2)
    assert Topology([1], placement=[0, 0, 0]) == Topology([1], laps=2)


def test_paired_lanes_need_even_and_odd_stages():
    topology = Topology([1] * 4, placement=[0, 1, 3, 2, 0])
    assert len(lanes(topology, "dedicated")) == 8
    with pytest.raises(TopologyError, match="has a hop from stage 1 to 3: use lanes='dedicated'"):
        lanes(topology, "paired")


def test_what_does_not_exist_is_refused():
    topology = Topology([1, 1])
    for call, message in [
        (lambda: topology.stage_of(3), "chunk 3 does not exist: this topology has chunks 0 to 2"),
        (lambda: topology.node_of(2), "rank 2 does not exist"),
        (lambda: topology.ranks_of(Node(2, 0)), "node 2.0 does not exist: nodes are 0.0, 1.0"),
        (lambda: topology.channel(2, "F", 0), "hop 2->3 of replica 0 has no channel"),
        (lambda: Topology([1]).channel(0, "F", 0), "hop 0->1 of replica 0 has no channel"),
        (lambda: lanes(topology, "both"), "'dedicated' or 'paired', got 'both'"),
        (lambda: Node.parse("1"), "expected a node as 'stage.replica'"),
        (lambda: Node.parse("٣.0"), "expected a node as 'stage.replica'"),
        (lambda: Node.parse("9" * 5000 + ".0"), "expected a node as 'stage.replica'"),
        (lambda: Topology.from_text("tp=1_0 dp=1 edge_dp=1 laps=1"), "expected a topology as"),
        (lambda: Topology.from_text("tp=1 dp=1 dp=1 edge_dp=1 laps=1"), "expected a topology as"),
        (lambda: Topology.from_text(f"tp={'9' * 5000} dp=1 edge_dp=1 laps=1"), "expected a topology as"),
        (lambda: Topology.from_text("tp=1 dp=1"), "expected a topology as"),
        (lambda: Topology.from_text("tp=1 dp=1 edge_dp=1 laps=1 x=2"), "expected a topology as"),
        (lambda: Topology.from_text("tp=1 dp=1 edge_dp=1 laps=1 sites="), "expected a topology as"),
        (lambda: Topology.from_text("tp=1,1 dp=1 edge_dp=1 laps=1 sites=0,1 2"), "expected a topology as"),
        (lambda: Topology.from_text("tp=1,1 dp=1 edge_dp=1 laps=1 sites=0,\u0661"), "expected a topology as"),
        (lambda: Topology.from_text("tp=1,1 dp=1 edge_dp=1 laps=1 sites=0,1,1"), "each of the 2 stages"),
        (lambda: Topology.from_text("tp=1,1 dp=1 edge_dp=1 laps=1 sites=0,0"), "a site of its own"),
    ]:
        with pytest.raises(TopologyError, match=message):
            call()


def test_errors_can_be_caught_by_what_they_are():
    assert issubclass(TopologyError, (LdtError, ValueError))
