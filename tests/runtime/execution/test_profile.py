"""``Pipeline(profile=)``: one trace of all ranks, with arrows, kernels on request, and nothing in other steps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import nn

import ldt
from ldt.cli import main
from ldt.plan import read_trace
from ldt.runtime.execution import profiler
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4
TOPOLOGY = Topology([1, 2, 1])
MICROBATCHES = 3
STEPS = range(1, 3)


def profiled(folder: str, kernels: bool, ahead: float = 0.0) -> list[Any]:
    """Run four steps and an eval, of which two steps are recorded. Returns numbers of entries and of broadcasts."""
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh, pytest.MonkeyPatch.context() as patch:
        if mesh.stage > 0 and ahead:
            now = time.time
            patch.setattr(time, "time", lambda: now() + ahead)
        pipeline = build(mesh, chunks, profile=ldt.Profile(folder, STEPS, kernels))
        sent: list[str] = []
        for name in ("gather", "broadcast"):
            count(mesh.control, name, sent, patch)
        batch = toy_microbatches(MICROBATCHES) if mesh.is_edge else None
        found = []
        for step in range(4):
            pipeline.step(batch)
            found.append(len(sent))
            if step == 1:
                pipeline.eval(batch)
        assert pipeline.steps._profiler is None
        return found


def count(owner: object, name: str, calls: list[str], patch: pytest.MonkeyPatch) -> None:
    original = getattr(owner, name)

    def counted(*args: Any) -> Any:
        calls.append(name)
        return original(*args)

    patch.setattr(owner, name, counted)


def check_trace(trace: dict[str, Any]) -> None:
    """All actions of all ranks are there, and each message of the two steps has one arrow, forward in time."""
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names) == [0, 1, 2, 3]
    assert names[2] == "rank 2: node 1.0 (cloud, chunks 1), TP rank 1"
    bars = Counter((e["pid"], e["name"]) for e in events if e["ph"] == "X" and e["cat"] in ("F", "B"))
    expected = {
        (rank, f"{chunk}{kind}{m}")
        for rank in range(4)
        for chunk in TOPOLOGY.chunks_of(TOPOLOGY.node_of(rank).stage)
        for kind in "FB"
        for m in range(MICROBATCHES)
    }
    assert bars == dict.fromkeys(expected, len(STEPS))
    assert [e["name"] for e in events if e["ph"] == "i"] == ["step 1", "step 2"]
    starts, ends = (
        {e["id"]: e for e in events if e["ph"] == phase and e["cat"] == "transfer"} for phase in "sf"
    )
    assert starts.keys() == ends.keys()
    assert len(starts) == len(STEPS) * MICROBATCHES * len(TOPOLOGY.channels)
    leaders = {node: TOPOLOGY.leader_of(node) for node in TOPOLOGY.nodes}
    for number, start in starts.items():
        action = ldt.plan.Action.parse(start["name"])
        channel = TOPOLOGY.channel(action.hop, action.kind.direction, 0)
        end = ends[number]
        assert (start["pid"], end["pid"]) == (leaders[channel.source], leaders[channel.target])
        assert start["ts"] <= end["ts"]


def test_one_trace_of_all_ranks(pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "profile"
    for sent in pool.run(profiled, str(folder), True):
        assert sent == [0, 0, 11, 11], "five round trips and a gather, at the end"
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    check_trace(trace)
    profile = trace["otherData"]["profile"]
    assert profile["steps"] == [1, 2]
    assert max(map(abs, profile["clocks"])) < 0.5, "of one host; off by up to half a round trip"
    timeline = read_trace(folder / "trace.json")
    assert len(timeline.transfers) == MICROBATCHES * len(TOPOLOGY.channels)

    files = sorted(folder.glob("kernels-*.json.gz"))
    assert [file.name for file in files] == [f"kernels-{rank}.json.gz" for rank in range(4)]
    merged = tmp_path / "all.json"
    command = ["trace", str(folder / "trace.json"), "--merge", *map(str, files), "--out", str(merged)]
    assert main(command) == 0
    assert "with the kernels of 4 ranks" in capsys.readouterr().out
    everything = json.loads(merged.read_text(encoding="utf-8"))
    check_trace(everything)
    check_kernels(everything["traceEvents"])
    assert read_trace(merged) == timeline
    assert main(["trace", str(merged)]) == 0


def check_kernels(events: list[dict[str, Any]]) -> None:
    """Operators of a forward lie within its action, on the clock of the trace."""
    for rank in range(4):
        mine = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        chunk = TOPOLOGY.chunks_of(TOPOLOGY.node_of(rank).stage)[0]
        forwards = sorted((e["ts"], e["ts"] + e["dur"]) for e in mine if e["name"] == f"{chunk}F1")
        marks = sorted((e["ts"], e["ts"] + e["dur"]) for e in mine if e["name"] == f"ldt {chunk}F1")
        assert len(forwards) == len(STEPS)
        assert len(marks) == len(STEPS) + 1, "and that of the eval between them"
        for start, _ in forwards:
            begin, finish = min(marks, key=lambda mark: abs(mark[0] - start))
            assert abs(begin - start) < 200_000, "microseconds"
            inside = [e for e in mine if e["name"] == "aten::linear" and begin <= e["ts"] <= finish]
            assert len(inside) == 2
            assert all(e["tid"] >= 100 for e in inside), "rows of their own"
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["tid"] >= 100}
    assert all(row.startswith("CPU thread") for row in rows)


def test_clocks_of_two_sites_are_aligned(pool: RankPool, tmp_path: Path) -> None:
    """Without kernels, which writes nothing else. The cloud's clock is an hour ahead."""
    pool.run(profiled, str(tmp_path), False, 3600.0)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    check_trace(trace)
    clocks = trace["otherData"]["profile"]["clocks"]
    assert clocks == pytest.approx([0.0, 3600.0, 3600.0, 3600.0], abs=0.5)
    ends = {e["name"]: e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X"}
    begins = {e["name"]: e["ts"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert ends["0F0"] - 20_000 < begins["1F0"], (
        "of the last step; each clock is off by up to half a round trip"
    )
    assert begins["1F0"] < ends["3B0"] + 1e6


def led(folder: str) -> list[str]:
    """The edge has a profile, and so has the third stage; the second has none."""
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        mine = [chunks[index] for index in TOPOLOGY.chunks_of(mesh.stage)]
        profile = (
            None if mesh.stage == 1 else ldt.Profile(f"{folder}/{mesh.stage}", STEPS, kernels=mesh.stage == 2)
        )
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None, profile=profile)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        if not mesh.is_edge:
            ldt.follow(pipeline, optimizer)
            return []
        with ldt.Leader(pipeline, optimizer) as leader:
            for _ in range(4):
                leader.step(toy_microbatches(MICROBATCHES))
        return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.*"))


def test_ranks_that_follow_are_recorded_too(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(led, str(tmp_path))[0] == ["0/trace.json", "2/kernels-3.json.gz"]
    check_trace(json.loads((tmp_path / "0" / "trace.json").read_text(encoding="utf-8")))


def unwritable(folder: str) -> list[str]:
    """The profile's file cannot be written: training goes on."""
    chunks = toy_chunks(TOPOLOGY)
    warned: list[str] = []
    with ldt.connect(TOPOLOGY) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler.logger, "warning", lambda text, *args: warned.append(text % args))
        (Path(folder) / "trace.json").mkdir(exist_ok=True)
        pipeline = build(mesh, chunks, profile=ldt.Profile(folder, range(1), kernels=False))
        for _ in range(2):
            pipeline.step(toy_microbatches(MICROBATCHES) if mesh.is_edge else None)
    return warned


def test_a_file_that_cannot_be_written_is_a_warning(pool: RankPool, tmp_path: Path) -> None:
    first, *rest = pool.run(unwritable, str(tmp_path))
    assert rest == [[], [], []]
    assert len(first) == 1
    assert first[0].startswith("the profile of all ranks could not be written to ")


class Failing(nn.Module):
    """Fails in its third forward of real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:
            self.calls += 1
            if self.calls == 3:
                raise ValueError("the third")
        output: torch.Tensor = self.linear(x)
        return output


def failing(folder: str) -> list[str]:
    """A step that is recorded fails. Then everything can be recorded anew."""
    topology = Topology([1, 1])
    torch.manual_seed(0)
    chunks = [nn.Linear(16, 16), Failing(), nn.Linear(16, 16)]
    mesh = ldt.connect(topology, ranks=range(2))
    pipeline = build(mesh, chunks, profile=ldt.Profile(folder, range(2)))
    with pytest.raises(ldt.RemoteStageError if mesh.is_edge else ValueError, match="the third"):
        pipeline.step(toy_microbatches(4) if mesh.is_edge else None)
    with mesh.reconnect() as again:
        pipeline = build(again, chunks, profile=ldt.Profile(folder, range(1)))
        pipeline.step(toy_microbatches(4) if again.is_edge else None)
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_step_that_fails_ends_the_recording(pool: RankPool, tmp_path: Path) -> None:
    files, _ = pool.run(failing, str(tmp_path), ranks=range(2))
    assert files == ["kernels-0.json.gz", "kernels-1.json.gz", "trace.json"]


def recorded_again_and_again() -> None:
    """Receives that were posted in one recording of torch end in a later one, on this mesh."""
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, toy_chunks(TOPOLOGY))
        batch = toy_microbatches(MICROBATCHES) if mesh.is_edge else None
        for _ in range(20):
            with torch.profiler.profile(acc_events=True):
                pipeline.step(batch)


def test_torch_may_record_again_and_again(pool: RankPool) -> None:
    pool.run(recorded_again_and_again)


ENDS_EARLY = """
import sys, torch, torch.distributed as dist, ldt
from ldt.testing import toy_chunks, toy_loss, toy_microbatches
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
topology = ldt.Topology([1])
with ldt.connect(topology) as mesh:
    profile = ldt.Profile(sys.argv[1], range(9))
    pipeline = ldt.Pipeline(toy_chunks(topology), mesh, loss_fn=toy_loss, profile=profile)
    pipeline.step(toy_microbatches(2))
"""


def test_a_run_that_ends_before_the_last_step_exits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_EARLY, str(tmp_path)],
        env={**os.environ, "LDT_LOG": "warning"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the profile was not written: it ended before its last step" in done.stderr
    assert list(tmp_path.iterdir()) == []


def refused(profiles: list[ldt.Profile | None]) -> str:
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        with pytest.raises(ldt.LdtError) as caught:
            build(mesh, chunks, profile=profiles[mesh.rank])
        return str(caught.value)


@pytest.mark.parametrize(
    ("other", "mine", "theirs"),
    [
        (
            range(1, 4),
            "must have the steps of the edge's, range(1, 3): rank 3 of the topology has range(1, 4)",
            "must have the steps of the edge's, range(1, 3): rank 3 of the topology has range(1, 4)",
        ),
        (
            range(1, 9, 2),
            "steps of a profile must be a range",
            "rank 3 cannot begin Pipeline()",
        ),
        (
            range(0),
            "steps of a profile must be a range",
            "rank 3 cannot begin Pipeline()",
        ),
        ("a folder", "profile must be an ldt.Profile, got str", "rank 3 cannot begin Pipeline()"),
    ],
    ids=["another", "a stride", "none", "a text"],
)
def test_a_wrong_profile_is_an_error_on_all_ranks(
    pool: RankPool, tmp_path: Path, other: Any, mine: str, theirs: str
) -> None:
    last = ldt.Profile(tmp_path, other) if isinstance(other, range) else other
    texts = pool.run(refused, [ldt.Profile(tmp_path, STEPS)] * 3 + [last])
    assert [mine in text if rank == 3 else theirs in text for rank, text in enumerate(texts)] == [True] * 4
    assert len({re.sub(r"ranks \[.*\]", "", text) for text in texts[:3]}) == 1
