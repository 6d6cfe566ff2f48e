"""Damaged or malicious files of plans, timelines and costs raise PlanError, quickly, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import HOSTILE, mutated_json, mutated_text

import ldt.plan
from ldt.errors import PlanError, TopologyError
from ldt.plan import Costs, Plan, Timeline, from_csv, simulate, to_csv, ushape, verify
from ldt.topology import Topology

TOPOLOGY = Topology([1, 1, 2], dp=2)
PLAN = ushape(TOPOLOGY, 3)
COSTS = Costs(
    forward=[1, 2, 3.5, 1], backward=2, weight=1, latency=0.1, bytes=10, speed={"1.0": 2.0, "0.0": 1}
)
HEAD = "# ldt plan 1\n# topology: {}\n# microbatches={} lanes=dedicated mode=train\n0.0,0F0\n"
SHORT = 3000  # characters in an error
Read = Callable[[str], Any]


def read_csv(text: str) -> Plan:
    return from_csv(text, TOPOLOGY)


BOTH_WAYS = Costs(1, 2, bandwidth={"up": 10, "down": [5, 5, 5]}, bytes={"forward": 3, "backward": [1, 2, 3]})
APART = ushape(Topology([1, 1, 2], sites=["office", 1, "far.away"]), 3)
READERS: dict[str, tuple[Read, str, Any]] = {
    "timeline": (Timeline.from_json, simulate(PLAN, COSTS).to_json(), mutated_json),
    "costs": (Costs.from_json, COSTS.to_json(), mutated_json),
    "costs by direction": (Costs.from_json, BOTH_WAYS.to_json(), mutated_json),
    "plan": (Plan.from_text, PLAN.to_text(), mutated_text),
    "plan with sites": (Plan.from_text, APART.to_text(), mutated_text),
    "csv": (read_csv, to_csv(PLAN), mutated_text),
}


@pytest.mark.parametrize("name", READERS)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_a_change_gives_something_or_the_one_error(name: str, data: st.DataObject) -> None:
    read, text, mutated = READERS[name]
    try:
        made = read(data.draw(mutated(text)))
    except PlanError as error:
        assert len(str(error)) < SHORT  # noqa: PT017 (it need not be raised)
        return
    if isinstance(made, Plan):
        with suppress(PlanError):
            verify(made)
    elif isinstance(made, Timeline):
        assert 0 <= made.bubble <= 1 or made.makespan == 0 or made.busy
        made.peak_live  # noqa: B018 (it must not fail)
    else:
        with suppress(PlanError):
            made.check(TOPOLOGY)


@pytest.mark.parametrize("name", READERS)
def test_what_is_nothing_of_the_kind(name: str) -> None:
    read = READERS[name][0]
    for text in [*HOSTILE, "x" * (17 << 20), "[" * (16 << 20), b"text", None]:
        with pytest.raises(PlanError) as caught:
            read(text)  # type: ignore[arg-type]
        assert len(str(caught.value)) < SHORT


@pytest.mark.parametrize(
    ("topology", "microbatches", "sentence"),
    [
        ("tp=1 dp=999999 edge_dp=999999 laps=1", 1, "expected at most 1000000 ranks and 100000 chunks"),
        ("tp=1,1 dp=999999 edge_dp=1 laps=1", 1, "expected at most 1000000 ranks"),
        ("tp=1,1 dp=1 edge_dp=1 laps=999999", 1, "expected at most 1000000 ranks"),
        (f"tp={','.join(['999999'] * 1000)} dp=1 edge_dp=1 laps=1", 1, "expected at most 1000000 ranks"),
        (f"tp={','.join(['1'] * 3400)} dp=29 edge_dp=1 laps=1", 1, "expected a plan of at most 10000 forwards"),
        (f"tp={','.join(['1'] * 3400)} dp=1 edge_dp=1 laps=1", 1, "expected rows for 0.0, 1.0, .* and 3384 more, got"),
        (f"tp=1 dp=1 edge_dp=1 laps=1 sites={','.join(['x'] * 100_000)}", 1, "sites needs the site of each of the 1"),
        (f"tp=1,1 dp=1 edge_dp=1 laps=1 sites=0,{'x' * 100_000}", 1, "header of the plan: expected a topology as"),
        ("tp=1 dp=1 edge_dp=1 laps=1", 999_999_999, "dp=1, 2 chunks and 999999999 microbatches make 1999999998"),
    ],
)  # fmt: skip
def test_headers_that_ask_for_more_than_there_is(topology: str, microbatches: int, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        Plan.from_text(HEAD.format(topology, microbatches))


def test_sites_are_kept_and_old_texts_have_none() -> None:
    assert Plan.from_text(APART.to_text()) == APART
    assert "laps=1 sites=office,1,far.away\n" in APART.to_text()
    assert "sites" not in PLAN.to_text() + simulate(PLAN, COSTS).to_json()
    assert Timeline.from_json(simulate(APART, BOTH_WAYS).to_json()).topology == APART.topology


def test_topologies_that_nobody_has() -> None:
    assert Topology([1, 9_999], dp=100).world_size == 1_000_000
    for arguments in (
        {"tp": [1, 10_000], "dp": 100},
        {"tp": [1] * 2, "laps": 50_000},
        {"tp": [1], "dp": 10**5000},
    ):
        with pytest.raises(TopologyError, match="at most 1000000"):
            Topology(**arguments)


@pytest.mark.parametrize("load", [Timeline.load, Costs.load, Plan.load])
def test_what_is_no_file_of_text(tmp_path: Path, load: Callable[[Path], Any]) -> None:
    """A pipe without a writer, an endless device: neither blocks."""
    names = {name: tmp_path / name for name in ("pipe", "folder", "bytes", "bom", "loop", "large")}
    os.mkfifo(names["pipe"])
    names["folder"].mkdir()
    names["bytes"].write_bytes(b"\xff\xfe\x00")
    names["bom"].write_bytes(b"\xef\xbb\xbf" + Costs(1, 2).to_json().encode())
    names["loop"].symlink_to("loop")
    with names["large"].open("wb") as stream:
        os.truncate(stream.fileno(), 1 << 40)
    for name, file in {**names, "zero": Path("/dev/zero")}.items():
        with pytest.raises(PlanError, match=name):
            load(file)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent")


def test_a_plan_is_saved_and_loaded(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.txt")
    assert Plan.load(tmp_path / "plan.txt") == PLAN
    assert ldt.plan.Plan.load(str(tmp_path / "plan.txt")) == PLAN
