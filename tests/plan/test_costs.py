"""Costs: the meaning of each value, files, and errors."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ldt.errors import PlanError
from ldt.plan import Action, Costs, simulate, ushape
from ldt.topology import Node, Topology

FIGURE = st.one_of(st.floats(0.001, 1e6), st.integers(1, 10**12), st.lists(st.floats(0.001, 9), max_size=4))
UP_AND_DOWN = st.fixed_dictionaries({"down": FIGURE, "up": FIGURE})
BOTH_WAYS = st.fixed_dictionaries({"backward": FIGURE, "forward": FIGURE})


@given(
    FIGURE,
    FIGURE,
    st.none() | FIGURE,
    st.none() | FIGURE,
    FIGURE,
    st.none() | FIGURE | UP_AND_DOWN,
    FIGURE | BOTH_WAYS,
    FIGURE | st.dictionaries(st.builds(Node, st.integers(0, 9), st.integers(0, 9)), st.floats(0.1, 9)),
)
def test_json_round_trip(forward, backward, weight, split_input, latency, bandwidth, size, speed):
    costs = Costs(forward, backward, weight, latency, bandwidth, size, split_input, speed)
    again = Costs.from_json(costs.to_json())
    assert again == costs
    assert hash(again) == hash(costs)


def test_jitter_counts_only_where_every_message_is_late():
    topology = Topology([1, 1, 1])
    costs = Costs(1, 2, latency=[1, 2, 3], jitter=[0.5, 0, 4])
    late = costs.with_every_message_late(topology)
    assert (late.latency, late.jitter) == ((1.5, 2, 7), 0)
    assert Costs.from_json(costs.to_json()) == costs
    plan = ushape(topology, 4)
    assert simulate(plan, costs) == simulate(plan, Costs(1, 2, latency=[1, 2, 3]))
    with pytest.raises(PlanError, match="jitter needs one number for each of the 3 hops, got 2"):
        Costs(1, 2, jitter=[1, 2]).check(topology)
    with pytest.raises(PlanError, match="jitter must be at least 0"):
        Costs(1, 2, jitter=-1).check(topology)


def test_figures_by_direction():
    costs = Costs(1, 2, bandwidth={"up": 10, "down": [1, 2]}, bytes={"forward": [20, 40], "backward": 10})
    assert [costs.occupancy(hop, "F", up) for hop in (0, 1) for up in (True, False)] == [2, 20, 4, 20]
    assert [costs.occupancy(hop, "B", up) for hop in (0, 1) for up in (True, False)] == [1, 10, 1, 5]
    assert Costs(1, 2, bandwidth=10, bytes=20).occupancy(1) == 2
    costs.check(Topology([1, 1]))
    with pytest.raises(PlanError, match="bandwidth needs one number for each of the 3 hops, got 2"):
        costs.check(Topology([1, 1, 1]))


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"bandwidth": {"up": 1}}, "bandwidth by direction needs 'up' and 'down', got 'up'"),
        ({"bandwidth": {"up": 1, "down": 1, "left": 1}}, "bandwidth by direction needs 'up' and 'down'"),
        (
            {"bytes": {"up": 1, "down": 1}},
            "bytes by direction needs 'forward' and 'backward', got 'up', 'down'",
        ),
        ({"bytes": {}}, "bytes by direction needs"),
        ({"latency": {"up": 1, "down": 1}}, "latency must be a number or a sequence of numbers"),
        (
            {"bandwidth": {"up": 1, "down": None}},
            "bandwidth must be a number or a sequence of numbers, got None",
        ),
        ({"bandwidth": {"up": 1, "down": {}}}, "bandwidth must be a number or a sequence of numbers"),
    ],
)
def test_directions_that_do_not_fit_are_refused(figures, message):
    with pytest.raises(PlanError, match=message):
        Costs(1, 2, **figures)


def test_figures_by_direction_are_checked():
    with pytest.raises(PlanError, match="bandwidth must be above 0 and finite, got 0"):
        Costs(1, 2, bandwidth={"up": 1, "down": [1, 0]}).check(Topology([1, 1]))
    text = '{"format": "ldt costs 1", "forward": 1, "backward": 1, "bytes": {"forward": 1, "backward": -1}}'
    with pytest.raises(PlanError, match="bytes must be at least 0 and finite, got -1"):
        Costs.from_json(text)


def test_save_and_load(tmp_path):
    costs = Costs(forward=[1, 2, 3], backward=2.5, latency=0.02, bandwidth=1.25e8, bytes=1 << 20)
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs


def test_a_written_file_may_leave_out_what_has_a_default():
    text = '{"format": "ldt costs 1", "forward": 1, "backward": [2, 2, 2]}'
    assert Costs.from_json(text) == Costs(forward=1, backward=[2, 2, 2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not JSON"),
        ("[1]", "it is a list, expected an object with the fields format, forward, backward, weight,"),
        ('{"format": "ldt costs 9"}', 'not a file of costs, "format": "ldt costs 1": it lacks .forward.'),
        (
            '{"format": "ldt costs 9", "forward": 1, "backward": 1}',
            "format is a text, expected 'ldt costs 1'",
        ),
        ('{"format": "ldt costs 1", "forward": 1}', "it lacks 'backward': expected an object"),
        ('{"format": "ldt costs 1", "forward": 1, "backward": 1, "lag": 2}', "it has a field 'lag'"),
        (
            '{"format": "ldt costs 1", "forward": "1", "backward": 1}',
            "forward is a text, expected a finite number or a list",
        ),
        ('{"format": "ldt costs 1", "forward": -1, "backward": 1}', "forward must be at least 0 and finite"),
        ('{"format": "ldt costs 1", "forward": 1, "backward": 1, "speed": {"x": 1}}', "speed is by node"),
    ],
)
def test_what_is_not_costs_is_refused(text, message, tmp_path):
    with pytest.raises(PlanError, match=message):
        Costs.from_json(text)
    (tmp_path / "costs.json").write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=r"costs\.json: "):
        Costs.load(tmp_path / "costs.json")


def test_a_figure_cannot_be_changed_from_outside():
    forward = [1.0, 2.0, 3.0]
    costs = Costs(forward, 2)
    forward[0] = 99.0
    assert costs == Costs([1.0, 2.0, 3.0], 2)


def compute(costs, text, node=None):
    return costs.compute(Action.parse(text), node)


def test_the_parts_of_a_backward():
    dearer = Costs(forward=1, backward=4, input=3, weight=2)
    assert [compute(dearer, text) for text in ("0B0", "0I0", "0W0")] == [4, 3, 2]
    with pytest.raises(PlanError, match="weight is a part of backward, got weight=5, backward=4 for chunk 0"):
        Costs(forward=1, backward=4, weight=5).check(Topology([1, 1]))
    Costs(forward=1, backward=4, weight=5, input=1).check(Topology([1, 1]))


def test_speed_divides_compute_times():
    topology = Topology([1, 1], dp=2)
    by_stage = Costs(forward=1, backward=2, speed=[1, 4])
    by_node = Costs(forward=1, backward=2, speed={"1.1": 0.5})
    assert [compute(by_stage, "1F0", node) for node in topology.nodes] == [1, 1, 0.25, 0.25]
    assert [compute(by_node, "1B0", node) for node in topology.nodes] == [2, 2, 2, 4]
    assert by_node == Costs(forward=1, backward=2, speed={Node(1, 1): 0.5})
    plan = ushape(topology, 3)
    assert simulate(plan, by_node).busy == {Node(0, 0): 18, Node(0, 1): 18, Node(1, 0): 9, Node(1, 1): 18}


@pytest.mark.parametrize(
    ("speed", "message"),
    [
        ([1, 1, 1], "speed needs one number for each of the 2 stages, got 3"),
        (0, "speed must be above 0 and finite, got 0"),
        ({"0.0": 0}, "speed must be above 0"),
        ({"2.0": 1}, r"speed has node 2\.0, but the nodes are 0\.0, 1\.0"),
    ],
)
def test_speeds_that_do_not_fit_are_refused(speed, message):
    with pytest.raises(PlanError, match=message):
        Costs(forward=1, backward=2, speed=speed).check(Topology([1, 1]))


def test_peak_bytes():
    plan = ushape(Topology([1, 1, 1]), 8)
    costs = Costs(forward=1, backward=2, activation_bytes=[10, 100, 1000, 1])
    timeline = simulate(plan, costs)
    assert timeline.peak_bytes(costs) == {Node(0, 0): 51, Node(1, 0): 300, Node(2, 0): 2000}
    same = Costs(forward=1, backward=2, activation_bytes=1)
    assert timeline.peak_bytes(same) == timeline.peak_live


def test_what_is_written_is_json_for_people():
    data = json.loads(Costs(forward=[1, 2], backward=2, speed={"0.0": 2}).to_json())
    assert data["forward"] == [1, 2]
    assert data["speed"] == {"0.0": 2}


@pytest.mark.parametrize(
    "figures",
    [
        {"forward": 1e308, "backward": 1e308},
        {"forward": 1, "backward": 2, "speed": 5e-324},
        {"forward": 1, "backward": 2, "bandwidth": 5e-324, "bytes": 1000},
        {"forward": 10**400, "backward": 2},
    ],
)
def test_figures_beyond_reason_are_refused(figures):
    with pytest.raises(PlanError, match="is out of range"):
        Costs(**figures).check(Topology([1, 1]))


def test_files_that_are_no_costs(tmp_path):
    for name, content in (("binary", b"\xff\xfe\x00"), ("deep", b"[" * 100_000)):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(PlanError, match=name):
            Costs.load(path)
