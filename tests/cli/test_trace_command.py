"""``python -m ldt trace``: what it prints of a step whose times are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ldt.cli import main
from ldt.plan import Costs, Timeline, chrome_trace, read_trace, simulate, ushape
from ldt.topology import Topology

COSTS = Costs(forward=[0.5, 1.0, 0.25], backward=[1.0, 2.0, 0.5], latency=0.125)


def timeline(microbatches: int = 2) -> Timeline:
    return simulate(ushape(Topology([1, 1]), microbatches), COSTS)


def written(folder: Path, form: str) -> Path:
    path = folder / "trace.json"
    if form == "trace":
        path.write_text(json.dumps(chrome_trace(timeline()), indent=1), encoding="utf-8")
    else:
        timeline().save(path)
    return path


@pytest.mark.parametrize("form", ["trace", "timeline"])
def test_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    path = written(tmp_path, form)
    assert read_trace(path) == timeline()
    assert main(["trace", str(path)]) == 0
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{1000 * timeline().makespan:.1f} ms, bubble {timeline().bubble:.1%}")
    table = {line.split()[0] if line[:4] != "node" else line[:8]: line.split("  ") for line in lines if line}
    cells = {name: [cell.strip() for cell in row if cell.strip()] for name, row in table.items()}
    # Two microbatches: chunk 1 takes 1 s forward and 2 s backward for each, and never waits but at the turn.
    assert cells["node 1.0"][1] == "6000.0 ms"
    assert cells["node 1.0"][3:6] == ["2000.0 ms", "4000.0 ms", "0.0 ms"]
    assert cells["node 0.0"][1] == "4500.0 ms"
    assert cells["F0:0.0->1.0"][1:4] == ["2", "125.0 ms", "125.0 ms"]
    assert set(cells) >= {"F1:1.0->0.0", "B1:0.0->1.0", "B0:1.0->0.0"}


def test_the_longest_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(chrome_trace(timeline(1))), encoding="utf-8")
    assert main(["trace", str(path), "--draw"]) == 0
    out = capsys.readouterr().out
    edge = next(line for line in out.splitlines() if line.startswith("node 0.0"))
    # 0F0 ends at 0.5 s; 2F0 starts after both hops and chunk 1: 0.125 + 1 + 0.125 s. Then 2B0, and B0 comes
    # back after 0.125 + 2 + 0.125 s.
    assert edge.endswith("2250.0 ms before 0B0")
    assert "0F0" in out.split("node")[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file"),
        ("[", "this is not a timeline"),
        ('{"traceEvents": []}', "this is not a timeline"),
        ('{"otherData": {"timeline": {"format": "ldt timeline 9"}}}', "this is not a timeline"),
    ],
)
def test_another_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, expected: str
) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert main(["trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m ldt trace: ")
    assert expected in error
    assert str(path) in error
