"""Links as they are measured: what is measured together, what counts of a train, and a slow link's own figures."""

from __future__ import annotations

import pytest
import torch

import ldt
from ldt.plan import Costs
from ldt.runtime.mesh.link_probe import rounds
from ldt.runtime.mesh.probe_tasks import arrived_by
from ldt.testing import ToyChunk, in_time, toy_loss, toy_microbatches
from ldt.topology import Topology

LATENCY = 0.02
Side = dict[str, float]


def side(rate: float, delay: float = LATENCY, loss: float = 0.0) -> Side:
    return {"rate": rate, "delay": delay, "loss": loss}


def test_what_shares_a_pipe_is_measured_at_once() -> None:
    topology = Topology([1] * 5, dp=2, edge_dp=1)
    names = [sorted(channel.name for channel in channels) for channels in rounds(topology)]
    crossing, *local = names
    assert crossing == sorted(
        channel.name for channel in topology.channels if 0 in (channel.source.stage, channel.target.stage)
    )
    assert sorted(name for round_ in local for name in round_) == sorted(
        channel.name for channel in topology.channels if topology.is_local(channel)
    )
    assert len(local) == 2, "1-2 and 3-4, then 2-3, of both replicas"


def test_each_two_sites_have_a_turn_of_their_own() -> None:
    topology = Topology([1, 1, 1], laps=2, sites=["a", "b", "c"])
    found = [sorted({*map(topology.pipe_of, channels)}) for channels in rounds(topology)]
    assert found == [["a->b", "b->a"], ["b->c", "c->b"], ["a->c", "c->a"]]


def test_bytes_arrive_evenly_between_two_arrivals() -> None:
    arrivals = [1.0, 2.0, 4.0]
    assert [arrived_by(moment, arrivals, 100) for moment in (0, 0.5, 1, 1.5, 2, 3, 4, 9)] == [
        0,
        50,
        100,
        150,
        200,
        250,
        300,
        300,
    ]


def measured(tp: list[int], connections: int | None, rows: int) -> Costs:
    topology = Topology(tp)
    torch.manual_seed(0)
    with ldt.connect(topology, connections=connections) as mesh:
        mine = [ToyChunk(16) for _ in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None)
        costs = Costs.measure(pipeline, toy_microbatches(2, batch=rows) if mesh.is_edge else None, steps=1)
        texts = mesh.control.all_gather(costs.to_json())
        assert len(set(texts)) == 1
        return costs


def costs_of_link(
    tp: list[int], up: Side, down: Side, connections: int | None = None, rows: int = 4
) -> Costs:
    """What is measured over that link (of ``wan_link.Settings``) with messages of 64 bytes a row."""
    from harness import in_ranks
    from wan_link import Settings, wide_area_link

    with wide_area_link(Settings(**up), Settings(**down)) as link:
        places = [link.places[0], *[link.places[1]] * (len(tp) - 1)]
        costs: Costs = in_ranks(measured, (tp, connections, rows), len(tp), places)
    return costs


@pytest.mark.usefixtures("wide_area")
def test_no_link_is_better_than_it_is() -> None:
    costs = costs_of_link([1, 1, 1], side(25e6), side(125e6))
    for hop in (0, 2):
        assert costs.latency[hop] > 0.999 * LATENCY
        assert 0.1 < costs.bandwidth["up"][hop] / 25e6 < 1.15
        assert 0.1 < costs.bandwidth["down"][hop] / 125e6 < 1.15
    assert costs.latency[1] < LATENCY


@pytest.mark.usefixtures("wide_area")
def test_lost_packets_make_jitter() -> None:
    lossy = side(25e6, 0.005, loss=0.01)
    costs = costs_of_link([1, 1], lossy, lossy, rows=2048)  # 92 packets
    assert min(costs.jitter) > 0.01, "a round trip"


@pytest.mark.slow  # on an idle machine
@pytest.mark.parametrize(
    ("tp", "up", "down", "connections"),
    [([1, 1, 1], 125e6, 125e6, None), ([1, 1], 25e6, 125e6, None), ([1, 1], 125e6, 125e6, 2)],
)
@pytest.mark.usefixtures("wide_area")
def test_a_slow_link_is_what_it_is(tp: list[int], up: float, down: float, connections: int | None) -> None:
    costs = costs_of_link(tp, side(up), side(down), connections)
    for hop in (0, len(tp) - 1):
        assert costs.latency[hop] > 0.999 * LATENCY
        assert in_time(costs.latency[hop] - LATENCY, 0.002)
        assert in_time(costs.jitter[hop], 0.01)
        for way, rate in (("up", up), ("down", down)):
            assert costs.bandwidth[way][hop] < 1.15 * rate
            assert in_time(rate / costs.bandwidth[way][hop], 1 / 0.85)
    if len(tp) == 3:
        assert in_time(costs.latency[1], 0.002)
        assert in_time(125e6 / costs.bandwidth["up"][1], 1.0)
