"""Steps after a load equal those of an uninterrupted job, bit for bit; other topologies load the same state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_jobs import Job, State, assert_equal_states, drawn, merged, seed_all

from ldt.testing import RankPool
from ldt.topology import Topology

WORLD_SIZE = 5
POSITION = {"epoch": 1, "sample": 48, "order": [3, (1, 2)]}


def resumed(path: Path, shape: dict[str, Any], frozen: list[int]) -> Any:
    """Run six steps; three, a save and three; and three more after loading into a new job."""
    topology = Topology(**shape)
    options: dict[str, Any] = {"dropout": 0.3, "frozen": frozen}
    with Job(topology, **options) as job:
        job.train(range(6))
        expected, numbers = job.state(), drawn()
    with Job(topology, **options) as job:
        job.train(range(3))
        job.save(path, 3, position=POSITION if job.mesh.is_edge else None)
        job.train(range(3, 6))
        assert_equal_states(job.state(), expected)
    with Job(topology, seed=7, **options) as job:
        loaded = job.load(path)
        assert loaded is not None
        job.train(range(3, 6))
        assert_equal_states(job.state(), expected)
        assert drawn() == numbers
        return loaded.step, loaded.position


@pytest.mark.parametrize(
    ("shape", "frozen"),
    [({"tp": [1, 1, 1]}, []), ({"tp": [1, 1, 1]}, [1]), ({"tp": [1, 2], "dp": 2, "edge_dp": 1}, [])],
)
def test_a_resumed_job_goes_on_as_if_it_never_stopped(
    pool: RankPool, tmp_path: Path, shape: dict[str, Any], frozen: list[int]
) -> None:
    world = Topology(**shape).world_size
    answers = pool.run(resumed, tmp_path, shape, frozen, ranks=range(world))
    edge = sum(step == 3 and position == POSITION for step, position in answers)
    assert answers == [(3, POSITION)] * edge + [(3, None)] * (world - edge)
    assert edge == 1


def saved(path: Path, shape: dict[str, Any], way: str) -> tuple[State, State]:
    """Return the state when it was saved, and one step later."""
    with Job(Topology(**shape), way) as job:
        job.train(range(3))
        job.save(path, 3)
        state = job.state()
        job.train([3])
        return state, job.state()


def loaded_elsewhere(path: Path, shape: dict[str, Any], way: str) -> tuple[State, State]:
    with Job(Topology(**shape), way, seed=7) as job:
        seed_all(5)
        before = drawn()
        seed_all(5)
        assert job.load(path) is not None
        assert drawn() == before, "random states of another topology are left alone"
        state = job.state()
        job.train([3])
        return state, job.state()


Case = tuple[dict[str, Any], str]
PLAIN: Case = {"tp": [1, 1, 1]}, "plain"
SPLIT: Case = {"tp": [1, 2]}, "plain"
SHARDED: Case = {"tp": [1, 2], "dp": 2, "edge_dp": 1}, "fully_shard"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLAIN, ({"tp": [1, 1]}, "plain")),
        pytest.param(PLAIN, ({"tp": [1, 1, 1, 1]}, "plain"), marks=pytest.mark.slow),
        (PLAIN, ({"tp": [1]}, "plain")),
        (PLAIN, ({"tp": [1, 1], "laps": 2}, "plain")),
        pytest.param(({"tp": [1, 1], "laps": 2}, "plain"), PLAIN, marks=pytest.mark.slow),
        (SPLIT, ({"tp": [1, 1]}, "plain")),
        pytest.param(({"tp": [1, 1]}, "plain"), SPLIT, marks=pytest.mark.slow),
        (SPLIT, ({"tp": [2, 3]}, "plain")),
        (PLAIN, ({"tp": [1, 1], "dp": 2}, "ddp")),
        (SHARDED, PLAIN),
        (PLAIN, SHARDED),
        pytest.param(SHARDED, ({"tp": [1, 1], "dp": 4, "edge_dp": 1}, "fully_shard"), marks=pytest.mark.slow),
    ],
)
def test_another_topology(pool: RankPool, tmp_path: Path, one: Case, other: Case) -> None:
    states = pool.run(saved, tmp_path, *one, ranks=range(Topology(**one[0]).world_size))
    expected, later = (merged(some) for some in zip(*states, strict=True))
    found = pool.run(loaded_elsewhere, tmp_path, *other, ranks=range(Topology(**other[0]).world_size))
    state, later_there = (merged(some) for some in zip(*found, strict=True))
    assert_equal_states(state, expected)
    assert any("exp_avg_sq" in name for name in expected)
    for name in later.keys() - {name for name in later if name.endswith("forwards")}:  # of each replica
        torch.testing.assert_close(later_there[name], later[name], rtol=1e-4, atol=1e-5)


def folders(own: Path, shared: Path) -> None:
    with Job(Topology([1, 1, 1])) as job:
        job.train(range(1))
        job.save(own if job.mesh.is_edge else shared, 1, position=[1])
        job.save(own if job.mesh.is_edge else shared, 2, position=[1])


def test_the_edge_keeps_what_is_its_own(pool: RankPool, tmp_path: Path) -> None:
    edge, cloud = tmp_path / "edge", tmp_path / "cloud"
    pool.run(folders, edge, cloud, ranks=range(3))
    assert sorted(p.name for p in edge.glob("step-*/*")) == ["stage-0"] * 2
    assert sorted(p.name for p in cloud.glob("step-*/*")) == ["stage-1", "stage-1", "stage-2", "stage-2"]
    records = {p.parent.name: json.loads(p.read_text()) for p in tmp_path.glob("*/step-2/*/stage.json")}
    assert {name: record["position"] for name, record in records.items()} == {
        "stage-0": [1],
        "stage-1": None,
        "stage-2": None,
    }
    of_cloud = b"".join(p.read_bytes() for p in cloud.rglob("*") if p.is_file())
    assert b"blocks.2." in of_cloud
    assert all(f"blocks.{block}.".encode() not in of_cloud for block in (0, 1, 6, 7)), "not even their names"


def test_a_load_drops_gradients(tmp_path: Path) -> None:
    """Gradients left by a failed step would be added to those of the next one."""
    with Job(Topology([1])) as job:
        job.train([0])
        job.save(tmp_path, 1)
        for parameter in job.pipeline.parameters():
            parameter.grad = torch.ones_like(parameter)
        job.load(tmp_path)
        assert all(parameter.grad is None for parameter in job.pipeline.parameters())
