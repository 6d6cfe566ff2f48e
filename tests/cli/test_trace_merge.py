"""``python -m ldt trace --merge``: what does not fit the trace is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ldt.cli import main, trace_kernels
from ldt.plan import Costs, chrome_trace, read_trace, simulate, ushape
from ldt.topology import Topology

BEGINS = 1_800_000_000.0


def trace_in(folder: Path) -> Path:
    timeline = simulate(ushape(Topology([1, 1]), 2), Costs(forward=0.25, backward=0.5))
    trace = chrome_trace(timeline)
    trace["otherData"]["profile"] = {"steps": [3], "begins": BEGINS, "clocks": [0.0, 2.0]}
    path = folder / "trace.json"
    path.write_text(json.dumps(trace), encoding="utf-8")
    return path


def kernels(rank: Any = 1, moment: float = BEGINS + 2.5) -> dict[str, Any]:
    """What a rank recorded whose clock is two seconds ahead: a launch on the CPU, its kernel, and an arrow."""
    base = int(BEGINS) - 100
    ts = (moment - base) * 1e6
    return {
        "ldt": {"rank": rank},
        "baseTimeNanoseconds": base * 10**9,
        "traceEvents": [
            {"ph": "M", "name": "process_labels", "pid": 77, "tid": 0, "args": {"labels": "CPU"}},
            {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
            {"ph": "X", "name": "launch", "cat": "cuda_runtime", "pid": 77, "tid": 78, "ts": ts, "dur": 3},
            {"ph": "X", "name": "gemm", "cat": "kernel", "pid": 0, "tid": 7, "ts": ts + 9, "dur": 40},
            {"ph": "s", "name": "ac2g", "cat": "ac2g", "pid": 77, "tid": 78, "ts": ts, "id": 5},
            {"ph": "f", "name": "ac2g", "cat": "ac2g", "pid": 0, "tid": 7, "ts": ts + 9, "id": 5, "bp": "e"},
            {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": ts, "s": "g"},
        ],
    }


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_kernels_of_two_ranks(tmp_path: Path, suffix: str) -> None:
    path = trace_in(tmp_path)
    files = [tmp_path / f"kernels-{rank}.json" for rank in range(2)]
    files[0].write_text(json.dumps(kernels(0, BEGINS + 0.5)), encoding="utf-8")
    files[1].write_bytes(gzip.compress(json.dumps(kernels(1)).encode()))
    out = tmp_path / f"all.json{suffix}"
    assert main(["trace", str(path), "--merge", *map(str, files), "--out", str(out)]) == 0
    data = out.read_bytes()
    trace = json.loads(gzip.decompress(data) if suffix else data)
    mine = [e for e in trace["traceEvents"] if e.get("tid", 0) >= 100]
    gemms = {e["pid"]: e for e in mine if e["name"] == "gemm"}
    assert [gemms[rank]["ts"] for rank in range(2)] == pytest.approx([500_009, 500_009], abs=1)
    arrows = [(e["ph"], e["pid"], e["id"]) for e in mine if e["name"] == "ac2g"]
    assert len({number for _, _, number in arrows}) == 2, "each rank has ids of its own"
    for rank in range(2):
        names = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name" and e["pid"] == rank}
        assert sorted(names.values()) == ["CPU 78", "GPU 0 stream 7"]
        assert names[gemms[rank]["tid"]] == "GPU 0 stream 7"
    assert read_trace(out) == read_trace(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read"),
        ("[1]", "is not a trace"),
        ("{", "cannot be read"),
        (json.dumps({"traceEvents": []}), "is not the kernels-<rank>.json.gz of a rank"),
        (json.dumps(kernels(rank=2)), "is not the kernels-<rank>.json.gz of a rank"),
        (json.dumps(kernels(rank=-1)), "is not the kernels-<rank>.json.gz of a rank"),
        (json.dumps(kernels(moment=BEGINS + 90)), "was recorded at another time"),
        (json.dumps(kernels(moment=BEGINS - 90)), "was recorded at another time"),
    ],
    ids=["missing", "list", "cut", "other", "rank", "below", "later", "earlier"],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, expected: str
) -> None:
    path, file = trace_in(tmp_path), tmp_path / "kernels-1.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    out = tmp_path / "all.json"
    assert main(["trace", str(path), "--merge", str(file), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"python -m ldt trace: {file} ")
    assert expected in error
    assert not out.exists()


def test_a_trace_without_a_profile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    timeline = simulate(ushape(Topology([1, 1]), 2), Costs(forward=0.25, backward=0.5))
    path.write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
    assert main(["trace", str(path), "--merge", str(path), "--out", str(tmp_path / "all.json")]) == 2
    assert "is not the trace.json of an ldt.Profile" in capsys.readouterr().err
    assert main(["trace", str(path), "--out", str(tmp_path / "all.json")]) == 2
    assert "--merge needs --out" in capsys.readouterr().err


def test_compressed_files_are_not_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = trace_in(tmp_path), tmp_path / "kernels-1.json.gz"
    command = ["trace", str(path), "--merge", str(file), "--out", str(tmp_path / "all.json")]
    compressed = gzip.compress(b" " * 100_000)
    file.write_bytes(compressed[:10] + b"\xff" * 20)
    assert main(command) == 2
    assert f"{file} cannot be read" in capsys.readouterr().err
    monkeypatch.setattr(trace_kernels, "_MAX_BYTES", 50_000)
    file.write_bytes(compressed)
    assert main(command) == 2
    assert "expected at most 50000 bytes, it decompresses to more" in capsys.readouterr().err
