"""A profile on late streams has the times of the streams: actions one after the other, each after its message."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

import npu
import torch

import ldt
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 2
TOPOLOGY = Topology([1, 1])
STEPS = range(1, 3)


def profiled(folder: str) -> None:
    with npu.late(3, 20_000) as device, torch.Stream(device):
        chunks = [chunk.to(device) for chunk in toy_chunks(TOPOLOGY, width=32)]
        batch = [(x.to(device), y.to(device)) for x, y in toy_microbatches(4, width=32)]
        with ldt.connect(TOPOLOGY, "hccl", transport="c10d") as mesh:
            mine = [chunks[index] for index in TOPOLOGY.chunks_of(mesh.stage)]
            profile = ldt.Profile(folder, STEPS, kernels=False)
            pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None, profile=profile)
            for _ in range(4):
                pipeline.step(batch if mesh.is_edge else None)


def test_actions_are_drawn_when_they_ran(pool: RankPool, tmp_path: Path) -> None:
    pool.run(profiled, str(tmp_path))
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["cat"] in ("F", "B"):
            rows[event["pid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    assert [len(rows[rank]) for rank in range(2)] == [2 * 4 * 4, 2 * 4 * 2]
    for row in rows.values():
        assert all(before[1] <= after[0] + 1 for before, after in itertools.pairwise(sorted(row)))
    bars = defaultdict(list)  # by name, of both steps
    for start, end, name in itertools.chain.from_iterable(map(sorted, rows.values())):
        bars[name].append((start, end))
    for m, step in itertools.product(range(4), range(len(STEPS))):
        path = [f"0F{m}", f"1F{m}", f"2F{m}", f"2B{m}", f"1B{m}", f"0B{m}"]
        for before, after in itertools.pairwise(path):
            assert bars[before][step][1] <= bars[after][step][0] + 1000, (before, after, "microseconds")
    moments = defaultdict(list)  # by phase and name, of both steps
    for event in sorted((event for event in events if event["ph"] in "sfe"), key=lambda event: event["ts"]):
        moments[event["ph"], event["name"]].append(event["ts"])
    for m, step in itertools.product(range(4), range(len(STEPS))):
        for source, send, target in (("0F", "0SEND_F", "1F"), ("1B", "1SEND_B", "0B")):
            begin, arrow, arrival = (moments[phase, f"{send}{m}"][step] for phase in "sfe")
            assert bars[f"{source}{m}"][step][1] - 1 <= begin <= arrow <= arrival
            assert arrival >= bars[f"{target}{m}"][step][0] - 1, "at the latest when it was needed"
