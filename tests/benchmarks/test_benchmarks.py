"""Each benchmark runs on the CPU in a small setting, writes the rows that it promises, and fails on wrong data."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    script, *options = map(str, command)
    return subprocess.run(
        [sys.executable, script, *options],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), str(BENCHMARKS)])},
    )


def rows_of(command: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each table, all with correct data."""
    script, *options = shlex.split(command)
    file = folder / "rows.json"
    done = run(BENCHMARKS / script, *options, "--device", "cpu", "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(file.read_text())["rows"]:
        assert row["wrong"] == 0
        tables.setdefault(row["table"], []).append(row)
    return tables


def test_p2p_overlap(tmp_path: Path) -> None:
    small = "--size 64KiB --count 1 --gemms 1 --latency-sizes 4KiB --latency-count 1"
    tables = rows_of(f"p2p_overlap.py {small}", tmp_path)
    paths = ["isend/irecv", "batch_isend_irecv", "lane, c10d"]
    assert [row["path"] for row in tables["OverlapRow"]] == paths
    assert [row["path"] for row in tables["LatencyRow"]] == paths
    for row in tables["OverlapRow"]:
        assert row.keys() >= {
            "size",
            "count",
            "load",
            "alone",
            "both",
            "hidden",
            "slowdown",
            "bounced",
        }
        assert [set(rank) for rank in row["by_rank"]] == [
            {"alone", "compute", "both", "hidden", "slowdown"}
        ] * 2
    assert all(0 < row["p50"] <= row["p99"] for row in tables["LatencyRow"])


@pytest.mark.slow
def test_host_overhead(tmp_path: Path) -> None:
    tables = rows_of("host_overhead.py --sizes 4KiB --count 4 --batch 2", tmp_path)
    calls = {(row["path"], row["call"]): row["count"] for row in tables["CallRow"]}
    assert calls["lane, c10d", "recv"] == calls["isend/irecv", "send"] == 4
    assert calls["batch_isend_irecv", "wait"] == 8


@pytest.mark.parametrize(
    ("layout", "lanes"),
    [
        ("", ["fused, c10d"]),
        pytest.param("--two-ranks", ["fused, c10d"], marks=pytest.mark.slow),
        pytest.param("--chunk-bytes 16KiB", ["fused, c10d", "fused, c10d, 16 KiB"], marks=pytest.mark.slow),
    ],
)
def test_recv_broadcast(layout: str, lanes: list[str], tmp_path: Path) -> None:
    tables = rows_of(f"recv_broadcast.py --sizes 64KiB --count 1 {layout}", tmp_path)
    assert [row["path"] for row in tables["MessageRow"]] == ["receive alone", "hand-made", *lanes]
    for row in tables["MessageRow"]:
        assert row.keys() >= {"p50", "p99", "over_receive", "exposed", "share", "gigabytes_per_second"}


def test_transfer(tmp_path: Path) -> None:
    tables = rows_of("transfer.py --tp 1 --sizes 64KiB --count 1", tmp_path)
    ways = [(row["transport"], row["way"]) for row in tables["TransferRow"]]
    assert ways == [("c10d", way) for way in ("leader", "scatter", "direct")]


@pytest.mark.slow
def test_transfer_between_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from two_hosts import why_not_two_hosts

    if reason := why_not_two_hosts():
        pytest.skip(reason)
    tables = rows_of("transfer.py --tp 2 --link 1Gbit --sizes 64KiB --count 1", tmp_path)
    assert [row["way"] for row in tables["TransferRow"]] == ["leader", "scatter", "direct"]


@pytest.mark.slow
def test_slow_link(tmp_path: Path) -> None:
    small = "--stages 2 --laps 1 --latency 1ms --forward 1ms --microbatches 2 --steps 1"
    tables = rows_of(f"slow_link.py {small}", tmp_path)
    assert [row["plan"] for row in tables["StepRow"]] == ["ushape", "optimize", "optimize, split"]


def test_metadata(tmp_path: Path) -> None:
    tables = rows_of("metadata.py --count 1 --microbatches 2 --length 16 --masks left", tmp_path)
    assert {row["path"] for row in tables["StepRow"]} == {"tensor ops", "one call", "no rows"}


def test_compression(tmp_path: Path) -> None:
    tables = rows_of("compression.py --count 1 --elements 4000", tmp_path)
    rows = [row for row in tables["PackRow"] if row["path"] == "8bit"]
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16", "float16"]
    assert all(row["error"] < 0.03 for row in rows)


def test_random_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tables = rows_of("random_weights.py --layers 2 --width 64 --vocabulary 100", tmp_path)
    assert [row["path"] for row in tables["DrawRow"]] == ["CPU, moved", "in place"]
    assert all(row["parameters"] == 2 * 65_664 + 64 + 6_400 for row in tables["DrawRow"])


def test_llama_step(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tables = rows_of("llama_step.py --layers 1 1 1 --steps 1 --microbatches 2", tmp_path)
    paths = ["ldt optimize, c10d", "torch 1F1B, halves", "one rank alone"]
    assert [row["path"] for row in tables["StepRow"]] == paths
    assert tables["StepRow"][0]["unequal"] == 0


@pytest.mark.slow
def test_compression_quality(tmp_path: Path) -> None:
    small = "--steps 2 --at 0 1 --minibatches 2 --seeds 2 --processes 2"
    tables = rows_of(f"compression_quality.py {small}", tmp_path)
    rows = [(row["step"], row["scheme"], row["added"]) for row in tables["GradientRow"]]
    assert [row[:2] for row in rows] == [(0, "bf16"), (0, "8bit"), (1, "bf16"), (1, "8bit")]
    assert all(0 < added < {"bf16": 1e-4, "8bit": 5e-3}[scheme] for _, scheme, added in rows)
    assert [row["scheme"] for row in tables["LossRow"]] == ["none", "bf16", "8bit"]
    assert all(0 < abs(row["over"]) < 0.05 for row in tables["LossRow"][1:])


def test_step_time(tmp_path: Path) -> None:
    tables = rows_of("step_time.py --steps 1 --microbatches 2", tmp_path)
    paths = {row["path"]: row for row in tables["StepRow"]}
    plans = {"ldt ushape, c10d", "ldt optimize, c10d", "torch ushape", "torch optimize"}
    assert paths.keys() == {*plans, "torch 1F1B, no U"}
    assert all(row["unequal"] == 0 for row in paths.values())  # on the CPU, bit for bit
    assert all(paths[name]["ratio"] > 0 for name in plans)


def test_run_all_goes_on_after_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from run_all import Job, run_jobs

    scripts = {
        "fails": "raise SystemExit(3)",
        "hangs": "import time; time.sleep(60)",
        "works": "print('rows')",
    }
    jobs = []
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
        jobs.append(Job(name, f"{tmp_path}/{name}.py", seconds=1))
    outcomes = run_jobs(jobs, [], 0, tmp_path, 30)
    assert [outcome.problem for outcome in outcomes] == ["exit code 3", "not done after 1 s", ""]
    assert (tmp_path / "works.txt").read_text().splitlines()[-1] == "rows"
    (none,) = run_jobs(jobs[:1], [], 0, tmp_path, 0)
    assert none.problem == "not run: no time was left"


BROKEN = """
import sys
from dataclasses import dataclass

import torch
from courier import Courier, Path
from harness import column, parse, parser, run


@dataclass(frozen=True)
class Row:
    name: str = column("name", "<6")
    none: float | None = column("none", ">6.1f")
    wrong: int = column("#wrong", ">7")


def measure(arguments):
    posted = []

    def receive(target):
        posted.append(target)
        return lambda: None

    def send(source):
        target = posted.pop()
        target.copy_(source)
        target[:{broken}] = 0
        return lambda: None

    path = Path("", send, receive, lambda number: torch.empty(number, dtype=torch.int32))
    courier = Courier(path, 64, torch.device("cpu"))
    courier.carry()
    yield Row("first", courier.bounced(), courier.wrong())


if __name__ == "__main__":
    sys.exit(run(measure, parse(parser("test"), lambda given: 1), "of a test"))
"""


@pytest.mark.parametrize("broken", [0, 3])
def test_wrong_data_fail(broken: int, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(broken=broken))
    done = run(script, "--device", "cpu", "--json", tmp_path / "rows.json")
    assert done.returncode == (1 if broken else 0), done.stderr
    head, row = done.stdout.splitlines()[-2:]
    assert head.split() == ["#", "name", "none", "#wrong"]
    assert row.split() == ["first", "-", str(broken)]
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["wrong"] == broken


def test_too_few_gpus_are_reported() -> None:
    done = run(BENCHMARKS / "p2p_overlap.py", "--device", "cuda", "--pairs", "500")
    assert done.returncode == 2
    assert "expected 1000 GPUs" in done.stderr


@pytest.mark.usefixtures("wide_area")
def test_steps_over_a_wide_area_link(tmp_path: Path) -> None:
    small = "--latency 5ms --stages 2 --microbatches 2 --bytes 64KiB --forward 1ms --steps 1 --warm-up 1"
    tables = rows_of(
        f"wan.py {small} --connections 2 --paths 'raw TCP' 'torch ushape' 'ldt optimize'", tmp_path
    )
    rows = tables["WanRow"]
    assert [(row["path"], row["over"] is None) for row in rows] == [
        ("raw TCP", True),
        ("raw TCP", True),
        ("torch ushape", True),
        ("torch ushape", False),
        ("ldt optimize", True),
        ("ldt optimize", False),
    ]
    for row in rows:  # two messages of 64 KiB each way; TCP adds headers, and repeats what is late
        assert row["up"] > 0.131
        assert row["down"] > 0.131
    assert rows[1]["measured"] > 5.0, "the latency of the link"
    assert min(rows[3]["measured"], rows[5]["measured"]) > 10.0, "up and down"
    assert rows[5]["simulated"] > rows[4]["simulated"] + 5.0


@pytest.mark.usefixtures("wide_area")
def test_packed_steps_over_connections_that_ldt_chooses(tmp_path: Path) -> None:
    small = "--latency 5ms --stages 2 --microbatches 2 --bytes 256KiB --forward 1ms --steps 1 --warm-up 1"
    tables = rows_of(
        f"wan.py {small} --loss 0.001 --connections auto --compression 8bit --paths 'ldt optimize'", tmp_path
    )
    for row in tables["WanRow"]:
        assert row["connections"] == "auto"
        assert 0.26 < row["up"] < 0.5 * 1.048, "a quarter of four messages, and headers"
