"""The fixed order: every shape is proven, warmup counts equal the published ones, memory is bounded."""

import itertools

import pytest

from ldt.errors import PlanError
from ldt.plan import Action, Costs, Kind, buffers_needed, remove_communication, simulate, ushape, verify
from ldt.plan.counts import warmup_counts
from ldt.topology import Node, Topology

UNIT = Costs(forward=1.0, backward=2.0)


@pytest.mark.parametrize("laps", [1, 2])
@pytest.mark.parametrize("stages", range(1, 9))
def test_every_shape_is_proven(stages, laps):
    """ushape verifies the plans that it returns: every M of 1..12 in both modes with both policies.

    For M in 13..32, where orders are periodic, each shape (P, laps, mode, policy) tests two values, ten apart. The next
    shape tests others, so that every M is tested with at least six shapes.
    """
    topology = Topology([1] * stages, laps=laps)
    for number, (training, policy) in enumerate(itertools.product((True, False), ("dedicated", "paired"))):
        sampled = 13 + (8 * (stages - 1) + 4 * (laps - 1) + number) % 10
        for microbatches in (*range(1, 13), sampled, sampled + 10):
            ushape(topology, microbatches, training=training, lanes=policy)


@pytest.mark.parametrize("served", [2, 3, 4])
@pytest.mark.parametrize("stages", range(2, 9))
def test_every_shape_of_a_shared_edge_is_proven(stages, served):
    """Test every M up to one more than the replicas served, and two up to 32 that differ from shape to shape."""
    shapes = itertools.product((1, 2), (True, False), ("dedicated", "paired"))
    for number, (laps, training, policy) in enumerate(shapes):
        topology = Topology([1] * stages, dp=served, edge_dp=1, laps=laps)
        sampled = [6 + (7 * (stages + number) + served + 13 * turn) % 27 for turn in range(2)]
        for microbatches in (*range(1, served + 2), *sampled):
            ushape(topology, microbatches, training=training, lanes=policy)


def computes(plan, node):
    return " ".join(str(action) for action in plan.rows[node] if action.kind.is_compute)


def test_one_lap_by_hand():
    plan = ushape(Topology([1, 1, 1]), 5)
    edge = "0F0 0F1 0F2 0F3 3F0 3B0 3F1 3B1 0F4 3F2 3B2 0B0 3F3 3B3 0B1 3F4 3B4 0B2 0B3 0B4"
    assert computes(plan, Node(0, 0)) == edge
    assert computes(plan, Node(1, 0)) == "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4"
    assert computes(plan, Node(2, 0)) == "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4"


def test_two_laps_by_hand():
    plan = ushape(Topology([1, 1], laps=2), 3)
    edge = "0F0 0F1 2F0 0F2 2F1 4F0 4B0 2F2 4F1 4B1 2B0 4F2 4B2 2B1 0B0 2B2 0B1 0B2"
    assert computes(plan, Node(0, 0)) == edge
    assert computes(plan, Node(1, 0)) == "1F0 1F1 3F0 1F2 3F1 3B0 3F2 3B1 1B0 3B2 1B1 1B2"


def test_a_shared_edge_by_hand():
    """The edge does each action for both replicas in turn; the second has one microbatch less."""
    plan = ushape(Topology([1, 1, 1], dp=2, edge_dp=1), 5)
    head = "0F0 0F1 0F2 0F3 0F4"
    edge = f"{head} 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 0B0 0B1 0B2 0B3 0B4"
    assert computes(plan, Node(0, 0)) == edge
    assert computes(plan, Node(1, 0)) == "1F0 1F2 1F4 1B0 1B2 1B4"
    assert computes(plan, Node(1, 1)) == "1F1 1F3 1B1 1B3"
    for node in plan.topology.nodes:
        one = ushape(Topology([1, 1, 1], dp=4, edge_dp=2), 5).rows[node]
        reduce = [action for action in one if action.kind is Kind.REDUCE_GRAD]
        assert sorted(action.chunk for action in reduce) == list(plan.topology.chunks_of(node.stage))


def test_a_replica_without_a_microbatch_only_reduces():
    plan = ushape(Topology([1, 1], dp=3, edge_dp=1, laps=2), 2)
    assert plan.rows[Node(1, 2)] == (Action(3, Kind.REDUCE_GRAD), Action(1, Kind.REDUCE_GRAD))
    assert not any(action.kind is Kind.REDUCE_GRAD for action in plan.rows[Node(0, 0)])


@pytest.mark.parametrize(
    ("stages", "laps", "stage", "counts"),
    [
        (1, 1, 0, (2, 0, 1)),
        (2, 1, 0, (3, 0, 2)),
        (3, 1, 0, (4, 0, 2)),
        (3, 1, 2, (1, 0, 2)),
        (4, 1, 1, (3, 0, 3)),
        (8, 1, 0, (9, 0, 6)),
        (1, 2, 0, (1, 1, 0)),
        (2, 2, 1, (2, 1, 1)),
        (4, 2, 0, (4, 4, 2)),
        (8, 2, 3, (8, 5, 5)),
    ],
)
def test_counts(stages, laps, stage, counts):
    assert warmup_counts(stages, 64, laps, stage) == counts
    assert warmup_counts(stages, 1, laps, stage) == tuple(min(count, 1) for count in counts)


@pytest.mark.parametrize("laps", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_no_time_is_lost_without_a_link(stages, laps):
    """With free links and many microbatches, the edge (laps + 1 chunks of each) is almost always busy."""
    microbatches = 48
    for training, work in ((True, 3.0), (False, 1.0)):
        plan = ushape(Topology([1] * stages, laps=laps), microbatches, training=training)
        bound = (laps + 1) * work * microbatches
        assert bound <= simulate(plan, UNIT).makespan <= 1.15 * bound


@pytest.mark.parametrize("policy", ["dedicated", "paired"])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_communication_costs_nothing_without_a_link(stages, policy):
    for laps in (1, 2):
        plan = ushape(Topology([1] * stages, laps=laps), 12, lanes=policy)
        assert simulate(plan, UNIT).makespan == simulate(remove_communication(plan), UNIT).makespan


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", ["dedicated", "paired"])
@pytest.mark.parametrize("laps", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_memory_does_not_grow_with_microbatches(stages, laps, policy, training):
    costs = Costs(forward=1.0, backward=2.0, latency=3.0)
    peaks, buffers = [], []
    for microbatches in (24, 48):
        plan = ushape(Topology([1] * stages, laps=laps), microbatches, training=training, lanes=policy)
        peaks.append(simulate(plan, costs).peak_live)
        buffers.append(buffers_needed(plan))
    assert peaks[0] == peaks[1]
    assert buffers[0] == buffers[1]
    assert max(peaks[0].values()) <= 2 * laps * (stages + 2)


def test_replicas_run_the_same_rows_and_reduce_once():
    plan = ushape(Topology([2, 1, 1], dp=2), 4)
    for stage in range(3):
        assert plan.rows[Node(stage, 0)] == plan.rows[Node(stage, 1)]
        reduces = [action.chunk for action in plan.rows[Node(stage, 0)] if action.kind is Kind.REDUCE_GRAD]
        assert sorted(reduces) == list(plan.topology.chunks_of(stage))
    row = plan.rows[Node(1, 0)]
    place = row.index(Action(1, Kind.REDUCE_GRAD))
    assert row[place - 2 : place] == (Action(1, Kind.B, 3), Action(1, Kind.SEND_B, 3))


def test_forward_only_has_nothing_to_reduce():
    plan = ushape(Topology([1, 1], dp=2), 2, training=False)
    assert not any(action.kind is Kind.REDUCE_GRAD for row in plan.rows.values() for action in row)


def test_what_ushape_does_not_know_is_refused():
    for topology in (Topology([1, 1], laps=3), Topology([1, 1], placement=[0, 1, 1, 0])):
        with pytest.raises(
            PlanError, match=r"ushape supports one and two laps and no placement, got tp=1,1 .* laps="
        ):
            ushape(topology, 2)
        verify(ushape(topology, 2, training=False))
    for laps in (1, 2):
        for wrong in (0, -1, -(10**6), True, None, "3", 2.0):
            for training in (True, False):
                with pytest.raises(PlanError, match=f"num_microbatches must be an int .* got {wrong!r}"):
                    ushape(Topology([1, 1], laps=laps), wrong, training=training)
    with pytest.raises(PlanError, match="receive_buffers must be at least 1, got 0"):
        ushape(Topology([1, 1]), 2, receive_buffers=0)


def test_many_stages_at_once():
    verify(ushape(Topology([1] * 16, laps=2), 40, lanes="paired"))
