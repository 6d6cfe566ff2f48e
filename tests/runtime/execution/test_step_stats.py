"""Statistics of a step: time, traffic, timelines, on one rank and gathered on the edge."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from pipeline_jobs import build

import ldt
import ldt.plan
from ldt.runtime import StepStats, merge_timelines
from ldt.runtime.control.edge_messages import Subject
from ldt.runtime.execution.recorder import Entry
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_microbatches
from ldt.topology import Node, Topology

WORLD_SIZE = 4
MICROBATCHES = 5
MESSAGE = 4 * 16 * 4  # bytes: batch 4, width 16, fp32


class Slow(ToyChunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:
            time.sleep(0.02)
        return super().forward(x)


def measured(tp: list[int], policy: Any) -> Any:
    topology = Topology(tp)
    torch.manual_seed(0)
    chunks = [Slow(16) if index == 1 else ToyChunk(16) for index in range(topology.num_chunks)]
    with ldt.connect(topology, lanes=policy) as mesh:
        pipeline = build(mesh, chunks)
        batch = toy_microbatches(MICROBATCHES) if mesh.is_edge else None
        pipeline.step(batch)
        result = pipeline.step(batch)
        mine = result.stats
        assert mine.seconds == pytest.approx(mine.computing + mine.waiting + mine.idle)
        assert min(mine.computing, mine.waiting, mine.idle) >= 0
        assert len(mine.entries) == len(pipeline.plan(MICROBATCHES).rows[mesh.node])
        assert StepStats.from_json(json.loads(json.dumps(mine.to_json()))) == mine
        gathered = pipeline.gather_stats(result)
        assert (gathered is not None) == mesh.is_edge
        return gathered


@pytest.mark.parametrize("policy", ["dedicated", "paired"])
def test_stats_of_all_ranks(pool: RankPool, policy: str) -> None:
    gathered, *rest = pool.run(measured, [1, 2, 1], policy)
    assert rest == [None] * 3
    assert [stats.rank for stats in gathered] == [0, 1, 2, 3]
    assert [stats.node for stats in gathered] == [Node(0, 0), Node(1, 0), Node(1, 0), Node(2, 0)]
    topology = gathered[0].topology
    expected = (MICROBATCHES, MICROBATCHES * MESSAGE)
    for channel in topology.channels:
        for stats in gathered:
            leads = topology.leader_of(stats.node) == stats.rank
            on_it = channel.target == stats.node or (channel.source == stats.node and leads)
            assert stats.channels.get(channel.name) == (expected if on_it else None)
    for stats in gathered:
        sent = sum(t.bytes for name, t in stats.channels.items() if f":{stats.node}->" in name)
        assert sum(lane["sent_bytes"] for lane in stats.lanes.values()) == sent
    assert all(stats.computing > MICROBATCHES * 0.02 for stats in gathered if stats.node.stage == 1)
    assert gathered[0].waiting > 0.02


def test_the_measured_timeline_is_that_of_the_plan(pool: RankPool) -> None:
    gathered = pool.run(measured, [1, 2, 1], "dedicated")[0]
    topology = gathered[0].topology
    timeline = merge_timelines(gathered)
    plan = ldt.plan.ushape(topology, MICROBATCHES)
    for node, row in plan.rows.items():
        measured_row = [event.action for event in timeline.compute if event.node == node]
        assert measured_row == [action for action in row if action.kind.is_compute]
    assert len(timeline.transfers) == len(topology.channels) * MICROBATCHES
    ends = {(e.node, e.action): e for e in timeline.compute}
    for transfer in timeline.transfers:
        assert transfer.end >= transfer.start
    forward = ends[Node(1, 0), ldt.plan.Action.parse("1F2")]
    assert forward.start >= ends[Node(0, 0), ldt.plan.Action.parse("0F2")].end, "one clock for all ranks"
    assert 0 < timeline.bubble < 1
    assert timeline.busy[Node(1, 0)] > MICROBATCHES * 0.02
    assert ldt.plan.chrome_trace(timeline)["traceEvents"]


def alone() -> StepStats:
    topology = Topology([1], laps=2)
    with ldt.connect(topology, ranks=[0]) as mesh:
        pipeline = build(mesh, toy_chunks(topology))
        result = pipeline.step(toy_microbatches(2))
        gathered = pipeline.gather_stats(result)
        assert gathered == [result.stats]
        return result.stats


def test_stats_without_a_channel(pool: RankPool) -> None:
    stats = pool.run(alone, ranks=[0])[0]
    assert stats.channels == {}
    assert len(stats.timeline.compute) == 2 * 2 * 3
    assert stats.waiting < 1e-3


def test_entries_round_trip() -> None:
    entry = Entry(ldt.plan.Action.parse("1SEND_F3"), 1.25, 2.5, 0.125)
    assert Entry.from_json(json.loads(json.dumps(entry.to_json()))) == entry


def control_messages() -> list[tuple[int, int, int, float]]:
    """Return, per step, edge messages received, sent about shapes, broadcasts of others, and bytes of the rest."""
    topology = Topology([1, 1, 1])
    chunks = toy_chunks(topology)
    batches = (
        toy_microbatches(3),
        toy_microbatches(5),
        toy_microbatches(3, batch=2),
        toy_microbatches(3, batch=2),
    )
    ragged = [toy_microbatches(1, batch=n)[0] for n in (3, 5, 7)]
    with ldt.connect(topology, ranks=range(3)) as mesh, pytest.MonkeyPatch.context() as patch:
        pipeline = build(mesh, chunks)
        calls: list[tuple[str, Any]] = []
        messages = mesh.edge_broadcast
        for owner, name in ((messages, "receive"), (messages, "send"), (mesh.control, "broadcast")):
            count(owner, name, calls, patch)
        numbers = []
        for batch in (*batches, ragged):
            before, sent = len(calls), messages.lanes()[0].stats()["sent_bytes"]
            pipeline.step(batch if mesh.is_edge else None)
            new = calls[before:]
            mesh.control.all_gather(None)
            sent = messages.lanes()[0].stats()["sent_bytes"] - sent if mesh.is_edge else 0
            shapes = [
                message for name, message in new if name == "send" and message.subject is Subject.SHAPES
            ]
            sent -= sum(2 * message.nbytes for message in shapes)
            names = [name for name, _ in new]
            numbers.append((names.count("receive"), len(shapes), names.count("broadcast"), sent))
        return numbers


def count(owner: object, name: str, calls: list[tuple[str, Any]], patch: pytest.MonkeyPatch) -> None:
    """Note the calls of a method, with their first argument."""
    original = getattr(owner, name)

    def counted(*args: Any) -> Any:
        calls.append((name, args[0] if args else None))
        return original(*args)

    patch.setattr(owner, name, counted)


def test_one_message_of_the_edge_per_step(pool: RankPool) -> None:
    """New shapes cost one more, whatever the number of chunks; otherwise it is a few bytes."""
    by_rank = pool.run(control_messages, ranks=range(3))
    new = [1, 0, 1, 0, 1]
    assert [[numbers[:3] for numbers in steps] for steps in by_rank] == [
        [(1 + one, one * (rank == 0), 0) for one in new] for rank in range(3)
    ]
    sent = [numbers[3] for numbers in by_rank[0]]
    assert max(sent) < 600, "to both other nodes"
    assert sent[3] == 2 * 24, "the same once more"


def receive_memory(numbers: list[int]) -> list[int]:
    """Return the bytes of all receive pools after steps with these numbers of microbatches."""
    topology = Topology([1, 1, 1])
    chunks = toy_chunks(topology)
    with ldt.connect(topology, ranks=range(3)) as mesh:
        pipeline = build(mesh, chunks)
        held = []
        for number in numbers:
            pipeline.step(toy_microbatches(number) if mesh.is_edge else None)
            held.append(sum(int(lane.stats()["pool_bytes"]) for lane in mesh.all_lanes()))
        return held


def test_receive_memory_does_not_grow_with_microbatches(pool: RankPool) -> None:
    for few, many, few_again in pool.run(receive_memory, [8, 64, 8], ranks=range(3)):
        assert 0 < few == many == few_again
        assert many < 16 * MESSAGE
