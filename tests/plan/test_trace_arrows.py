"""The arrows of a Chrome trace: from each send to its receive, between slices that do not overlap."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

import pytest

from ldt.plan import Costs, Timeline, chrome_trace, simulate, ushape
from ldt.topology import Topology

TOPOLOGIES = [
    Topology([1, 1]),
    Topology([1, 2, 1]),
    Topology([1, 1, 1], laps=2),
    Topology([1, 1, 1], dp=4, edge_dp=2),
]
# Links that keep up, where one message is in flight, and one on which many queue.
LINKS = [
    Costs(forward=0.25, backward=0.5, latency=0.125),
    Costs(forward=0.01, backward=0.02, latency=0.5, bandwidth=2.0, bytes=1),
    Costs(forward=0.25, backward=0.5),
]


def slices_of(trace: dict[str, Any]) -> dict[tuple[int, int], list[tuple[str, float, float, list[Any]]]]:
    """By row the slices of sends and receives, with the flow events between their begin and end."""
    rows = defaultdict(list)
    open_slices: dict[tuple[int, int], tuple[str, float, list[Any]]] = {}
    for event in trace["traceEvents"]:
        row = event["pid"], event.get("tid")
        if event["ph"] == "B":
            assert row not in open_slices, "slices of a row do not overlap"
            open_slices[row] = event["name"], event["ts"], []
        elif event["ph"] in "sf":
            open_slices[row][2].append(event)
        elif event["ph"] == "E":
            name, start, flows = open_slices.pop(row)
            assert start <= event["ts"] + 1e-6
            rows[row].append((name, start, event["ts"], flows))
    assert not open_slices
    return rows


def check_arrows(trace: dict[str, Any], timeline: Timeline) -> None:
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    pids = {node: pid for pid, node in enumerate(timeline.topology.nodes)}
    ends: dict[str, dict[int, Any]] = {"s": {}, "f": {}}
    for row, slices in slices_of(trace).items():
        assert all(one[2] <= other[1] + 1e-6 for one, other in itertools.pairwise(slices))
        for name, start, end, (flow,) in slices:
            assert flow["id"] not in ends[flow["ph"]], "one start and one end"
            assert start <= flow["ts"] <= max(start, end)
            ends[flow["ph"]][flow["id"]] = (names[row], row[0], name, start, end, flow)
    assert len(ends["s"]) == len(ends["f"]) == len(timeline.transfers) > 0
    for number, event in enumerate(timeline.transfers):
        begin, arrival = ((moment - timeline.start) * 1e6 for moment in (event.start, event.end))
        row, pid, name, start, _, flow = ends["s"][number]
        assert (row, pid, name) == ("sends", pids[event.node], str(event.action))
        assert start == pytest.approx(begin)
        row, pid, name, _, end, other = ends["f"][number]
        assert event.channel is not None
        assert (row, pid, name) == (
            "receives",
            pids[event.channel.target],
            str(event.action.counterpart),
        )
        assert end == pytest.approx(arrival)
        assert flow["ts"] <= other["ts"]
        assert other["bp"] == "e", "bound to the slice around it, not to the next one"
        assert (flow["cat"], flow["name"]) == (other["cat"], other["name"])


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=Topology.to_text)
@pytest.mark.parametrize("costs", LINKS, ids=["apart", "queued", "at once"])
def test_each_transfer_has_one_arrow(topology: Topology, costs: Costs) -> None:
    timeline = simulate(ushape(topology, 8), costs)
    check_arrows(json.loads(json.dumps(chrome_trace(timeline))), timeline)


def test_a_timeline_without_transfers_has_no_arrows() -> None:
    timeline = simulate(ushape(Topology([1]), 2), LINKS[0])
    phases = {event["ph"] for event in chrome_trace(timeline)["traceEvents"]}
    assert phases == {"M", "X"}
