"""Ranks agree on new shapes in one exchange, in which a link between sites is crossed once in each direction."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from pipeline_jobs import build

import ldt
from ldt.runtime.control.collectives import Collectives
from ldt.testing import RankPool, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 5
Sent = dict[str, list[int]]  # by kind of message: how many in each call


class Count:
    """Counts what this rank sends in each call."""

    def __init__(self, mesh: ldt.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
        self._mesh = mesh
        self._collectives = 0
        self._last: Counter[str] = Counter()
        self.sent: Sent = {}
        finish = Collectives._finish

        def counted(collectives: Collectives, *arguments: Any, **options: Any) -> None:
            self._collectives += 1
            finish(collectives, *arguments, **options)

        monkeypatch.setattr(Collectives, "_finish", counted)

    def take(self) -> None:
        """Note the messages since the last call of this."""
        sent = Counter(collectives=self._collectives)
        for lane in self._mesh.edge_broadcast.lanes():
            sent["chain" if lane.name.startswith("chain") else "edge"] += int(lane.stats()["sent_messages"])
        for name in ("collectives", "chain", "edge"):
            self.sent.setdefault(name, []).append(sent[name] - self._last[name])
        self._last = sent


def train(tp: list[int], dp: int, edge_dp: int, laps: int) -> Sent:
    """Make a step and an eval of each of five shapes, some known. Returns what this rank sent in each call."""
    topology = Topology(tp, dp=dp, edge_dp=edge_dp, laps=laps)
    chunks = toy_chunks(topology)
    with (
        ldt.connect(topology, ranks=range(topology.world_size)) as mesh,
        pytest.MonkeyPatch.context() as patch,
    ):
        pipeline = build(mesh, chunks)
        count = Count(mesh, patch)
        for rows in (3, 3, 4, 5, 4):
            batches = [
                toy_microbatches(4, batch=rows + 10 * replica * (rows == 5), seed=replica)
                for replica in range(edge_dp)
            ]
            given = batches[mesh.replica] if mesh.is_edge else None
            for call in (pipeline.step, pipeline.eval):
                call(given)
                count.take()
        return count.sent


def expected(topology: Topology, rank: int, new: list[bool]) -> Sent:
    """One message of each first leader of a cloud stage to each leader of the next, one of the edge's to all, a lap."""
    node = topology.node_of(rank)
    following = (node.stage + 1) % topology.num_stages
    others = len(topology.nodes) - 1
    leads = rank == topology.leader_of(node)
    passes_on = leads and node.stage > 0 and node.replica == 0
    passed = topology.laps * topology.replicas(following) if passes_on else 0
    broadcast = others if leads and node.stage == 0 else 0
    return {
        "chain": [passed * one for one in new],
        "edge": [broadcast * (1 + topology.laps * one) for one in new],
    }


@pytest.mark.parametrize(
    ("tp", "dp", "edge_dp", "laps"),
    [
        ([1, 1, 1, 1, 1], 1, 1, 1),
        ([1, 1, 1], 1, 1, 2),
        ([1, 1], 2, 2, 1),
        ([1, 2], 2, 1, 1),
        ([2, 1, 2], 1, 1, 1),
    ],
)
def test_new_shapes_cost_one_exchange(
    pool: RankPool, tp: list[int], dp: int, edge_dp: int, laps: int
) -> None:
    topology = Topology(tp, dp=dp, edge_dp=edge_dp, laps=laps)
    new = [one for one in (True, False, True, True, False) for _ in ("step", "eval")]
    answers = pool.run(train, tp, dp, edge_dp, laps, ranks=range(topology.world_size))
    for rank, sent in enumerate(answers):
        collectives = sent.pop("collectives")
        assert sent == expected(topology, rank, new)
        if topology.tp[topology.node_of(rank).stage] == 1:
            assert collectives == [0] * len(new)
