"""Timelines, planned and measured, and their drawings."""

import json
import sys
import xml.etree.ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ldt.errors import PlanError
from ldt.plan import Action, Costs, Event, Kind, Timeline, chrome_trace, draw, draw_text, simulate, ushape
from ldt.topology import Node, Topology

COSTS = Costs(forward=0.25, backward=0.5, latency=0.125)


def planned(stages=3, laps=1, microbatches=4, costs=COSTS, **options):
    return simulate(ushape(Topology([1] * stages, laps=laps), microbatches, **options), costs)


def measured(plan, costs, zero=1000.0):
    """Return the recording of a run without delays: all actions of all rows, on a clock of its own."""
    timeline = simulate(plan, costs)
    records = [(e.node, e.action, zero + e.start, zero + e.end) for e in timeline.compute]
    for event in timeline.transfers:
        records.append((event.node, event.action, zero + event.start, zero + event.start))
        records.append((event.channel.target, event.action.counterpart, zero + event.start, zero + event.end))
    return Timeline.from_records(plan.topology, records)


@pytest.mark.parametrize("topology", [Topology([1, 1, 1]), Topology([1, 1, 1], dp=4, edge_dp=2)])
@pytest.mark.parametrize("training", [True, False])
def test_a_measured_timeline_has_the_same_figures(training, topology):
    plan = ushape(topology, 5, training=training)
    expected, got = simulate(plan, COSTS), measured(plan, COSTS)
    for one, other in zip(got.events, expected.events, strict=True):
        assert (one.node, one.action, one.channel) == (other.node, other.action, other.channel)
    assert (got.makespan, got.bubble, got.busy) == (expected.makespan, expected.bubble, expected.busy)
    assert got.peak_live == expected.peak_live
    assert Timeline.from_json(got.to_json()) == got


def test_a_transfer_known_from_one_side_only_is_left_out():
    topology = Topology([1, 1])
    send = (Node(0, 0), Action.parse("0SEND_F0"), 1.0, 1.1)
    receive = (Node(1, 0), Action.parse("1RECV_F0"), 0.5, 2.0)
    assert Timeline.from_records(topology, [send]).events == ()
    channel = topology.channel(0, "F", 0)
    both = Timeline.from_records(topology, [send, receive])
    assert both.events == (Event(Node(0, 0), Action(0, Kind.SEND_F, 0), 1.0, 2.0, channel),)


def test_an_empty_timeline_is_all_zero():
    timeline = Timeline(Topology([1]), ())
    assert (timeline.makespan, timeline.bubble, timeline.busy) == (0.0, 0.0, {Node(0, 0): 0.0})
    assert timeline.peak_live == {Node(0, 0): 0}
    assert draw_text(timeline).startswith("0.0 | \n")


def test_peak_live_by_hand():
    timeline = planned(stages=3, microbatches=8, costs=Costs(forward=1, backward=2))
    assert timeline.peak_live == {Node(0, 0): 6, Node(1, 0): 3, Node(2, 0): 2}


def test_peak_live_without_backward():
    """An output is kept until it was sent, here for 2.5 s from its forward's start, or used on its own node."""
    timeline = planned(
        stages=3, microbatches=8, training=False, costs=Costs(forward=1, backward=0, latency=1.5)
    )
    assert timeline.peak_live == {Node(0, 0): 3, Node(1, 0): 2, Node(2, 0): 2}
    assert planned(stages=1, microbatches=8, training=False).peak_live == {Node(0, 0): 2}


@given(st.integers(1, 4), st.integers(1, 2), st.integers(1, 5), st.booleans(), st.floats(0, 1))
def test_json_round_trip(stages, laps, microbatches, training, latency):
    costs = Costs(forward=1 / 3, backward=0.7, latency=latency)
    timeline = planned(stages, laps, microbatches, costs, training=training)
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_save_and_load(tmp_path):
    timeline = planned()
    timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == timeline


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"format": "ldt timeline 9"}', '{"format": "ldt timeline 1"}']
)
def test_what_is_not_a_timeline_is_refused(text):
    with pytest.raises(PlanError, match="this is not a timeline"):
        Timeline.from_json(text)


def test_text_of_a_plan():
    assert draw_text(ushape(Topology([1, 1, 1]), 2)) == (
        "0.0 | 0F0-0F1-....3F0-3B0=====3F1-3B1=====....0B0=====....0B1=====\n"
        "1.0 | ....1F0-1F1-....................1B0=====....1B1=====........\n"
        "2.0 | ........2F0-2F1-........2B0=====....2B1=====................\n"
        "      makespan 15, bubble 46.7%\n"
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_text_keeps_to_its_width(width):
    for timeline in (planned(), planned(8, 2, 32), measured(ushape(Topology([1, 1]), 3), COSTS)):
        lines = draw_text(timeline, width).splitlines()
        assert len(lines) == len(timeline.topology.nodes) + 1
        assert max(map(len, lines)) <= width
        assert len({len(line) for line in lines[:-1]}) == 1


def test_chrome_trace():
    timeline = planned()
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    events = trace["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [
        "node 0.0 (edge, chunks 0, 3)",
        "node 1.0 (cloud, chunks 1)",
        "node 2.0 (cloud, chunks 2)",
    ]
    bars = {event["name"]: event for event in events if event["ph"] == "X"}
    assert len(bars) == len(timeline.compute)
    assert bars["1F0"]["ts"] == pytest.approx(375_000)
    assert bars["1F0"]["dur"] == pytest.approx(250_000)
    begins, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "be")
    assert begins.keys() == ends.keys()
    assert len(begins) == len(timeline.transfers)
    assert all(ends[key]["ts"] - begins[key]["ts"] == pytest.approx(125_000) for key in begins)


def test_a_trace_starts_at_zero():
    plan = ushape(Topology([1, 1]), 2)
    ours, theirs = (
        chrome_trace(timeline)["traceEvents"] for timeline in (measured(plan, COSTS), simulate(plan, COSTS))
    )
    assert [event.get("ts") for event in ours] == [event.get("ts") for event in theirs]


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    plan = ushape(Topology([1, 1, 1], laps=2), 6)
    shared = simulate(ushape(Topology([1, 1], dp=4, edge_dp=2), 4), COSTS)
    timelines = {"planned": simulate(plan, COSTS), "measured": measured(plan, COSTS), "shared": shared}
    png = draw(timelines, tmp_path / "picture.png", title="a step")
    assert png.read_bytes().startswith(b"\x89PNG")
    svg = draw(timelines, tmp_path / "picture.svg", title="a step").read_text(encoding="utf-8")
    xml.etree.ElementTree.fromstring(svg)
    for text in (
        "a step",
        "planned: makespan",
        "measured: makespan",
        "edge 0.0 -->",
        "cloud 2.0",
        "serves 1, 3",
        "forward",
        "idle",
    ):
        assert f"<!-- {text}" in svg, text


def test_a_picture_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"draw needs matplotlib: pip install 'ldt-torch\[plot\]'"):
        draw({"planned": planned()}, tmp_path / "picture.png")


def test_a_picture_of_nothing_is_refused(tmp_path):
    with pytest.raises(PlanError, match="draw needs at least one timeline"):
        draw({}, tmp_path / "picture.png")
