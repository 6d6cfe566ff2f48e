"""A profile on a GPU: actions when their streams ran them, kernels on the same clock; the view does not wait."""

from __future__ import annotations

import io
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from sharing import my_device

import ldt
from ldt.cli import main
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches

WORLD_SIZE = 2
TOPOLOGY = ldt.Topology([1, 1])
STEPS = range(2, 4)
WIDTH, ROWS, MICROBATCHES = 2048, 2048, 4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def profiled(folder: str) -> str:
    """Run five steps with a view. Returns what it drew last."""
    device = my_device()
    torch.cuda.set_device(device)
    with ldt.connect(TOPOLOGY, "nccl", device=device, transport="copy_engine") as mesh:
        chunks = toy_chunks(TOPOLOGY, width=WIDTH)
        mine = [chunks[index].to(device) for index in TOPOLOGY.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss, profile=ldt.Profile(folder, STEPS))
        batch = None
        if mesh.is_edge:
            made = toy_microbatches(MICROBATCHES, width=WIDTH, batch=ROWS)
            batch = [(x.to(device), y.to(device)) for x, y in made]
        if mesh.rank != 0:
            for _ in range(5):
                pipeline.step(batch)
            return ""
        from rich.console import Console

        console = Console(record=True, file=io.StringIO(), force_terminal=True, width=120)
        with ldt.LiveView(pipeline, console=console) as view:
            for _ in range(5):
                view.update(pipeline.step(batch))
            torch.cuda.synchronize()
        return console.export_text()


def bars_of(
    events: list[dict[str, Any]], categories: tuple[str, ...]
) -> dict[int, list[tuple[float, float, str]]]:
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event.get("cat") in categories:
            rows[event["pid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return {pid: sorted(row) for pid, row in rows.items()}


def test_actions_and_kernels_on_one_clock(pool: RankPool, tmp_path: Path) -> None:
    text, _ = pool.run(profiled, str(tmp_path), timeout=80)
    assert "step 5, loss " in text
    files = sorted(tmp_path.glob("kernels-*.json.gz"))
    assert len(files) == 2
    merged = tmp_path / "all.json"
    command = ["trace", str(tmp_path / "trace.json"), "--merge", *map(str, files), "--out", str(merged)]
    assert main(command) == 0
    events = json.loads(merged.read_text(encoding="utf-8"))["traceEvents"]
    actions, kernels = bars_of(events, ("F", "B")), bars_of(events, ("kernel",))
    for rank, row in actions.items():
        assert len(row) == len(STEPS) * MICROBATCHES * (4 if rank == 0 else 2)
        assert all(before[1] <= after[0] + 50 for before, after in itertools.pairwise(row))
        found = [k for k in kernels[rank] if "gemm" in k[2].lower() or "nvjet" in k[2].lower()]
        assert found
        slack = 500.0  # microseconds between the clocks of events and of the profiler
        inside = [any(a[0] - slack <= k[0] and k[1] <= a[1] + slack for a in row) for k in found]
        assert sum(inside) >= 0.95 * len(found), f"{sum(inside)} of {len(found)} kernels lie in an action"
    arrows = {
        phase: {e["id"]: e for e in events if e["ph"] == phase and e.get("cat") == "transfer"}
        for phase in "sf"
    }
    assert len(arrows["s"]) == len(STEPS) * MICROBATCHES * 4
    assert all(start["ts"] <= arrows["f"][number]["ts"] for number, start in arrows["s"].items())
