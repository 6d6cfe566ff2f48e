"""Checkpoints on GPUs: a resumed job equals one that never stopped, also with other sharding.

Three ranks. On fewer GPUs they share them: see sharing.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sharing import my_device
from torch.distributed.tensor import DTensor

from ldt.testing import RankPool
from ldt.topology import Topology

sys.path.append(str(Path(__file__).parents[1] / "train"))
from checkpoint_jobs import Job, State, assert_equal_states, merged

WORLD_SIZE = 3
BACKEND = "nccl"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def job_on(device: torch.device, tp: list[int], **options: Any) -> Job:
    return Job(Topology(tp), backend=BACKEND, device=device, **options)


def drawn_on(device: torch.device) -> list[float]:
    """Draw the next random numbers of the device's generator."""
    numbers: list[float] = torch.rand(4, device=device).tolist()
    return numbers


def resumed(path: Path, tp: list[int]) -> list[float]:
    """Run two steps, a save, two more steps; then a new job loads and repeats the last two."""
    device = my_device()
    with job_on(device, tp, dropout=0.3) as job:
        job.train(range(2))
        job.save(path, 2)
        saved = job.state()
        job.train(range(2, 4))
        expected, numbers = job.state(), drawn_on(device)
    with job_on(device, tp, dropout=0.3, seed=7) as job:
        loaded = job.load(path)
        assert loaded is not None
        assert loaded.step == 2
        assert_equal_states(job.state(), saved)
        assert all(parameter.device == device for parameter in job.pipeline.parameters())
        job.train(range(2, 4))
        assert_equal_states(job.state(), expected)
        assert any("exp_avg_sq" in name for name in expected)
        assert drawn_on(device) == numbers
    return numbers


@pytest.mark.parametrize("tp", [[1, 2], [2, 1]], ids=str)
def test_a_resumed_job_equals_one_that_never_stopped(pool: RankPool, tmp_path: Path, tp: list[int]) -> None:
    numbers = pool.run(resumed, tmp_path, tp, timeout=120)
    node = [numbers[0], numbers[1]] if tp == [2, 1] else [numbers[1], numbers[2]]
    assert node[0] == node[1], "ranks of a node drop the same"
    assert numbers[0] != numbers[2], "those of several do not"


def saved(path: Path, tp: list[int]) -> tuple[State, State]:
    """Return the state at the save, and one step later."""
    with job_on(my_device(), tp) as job:
        job.train(range(2))
        job.save(path, 2)
        state = job.state()
        job.train([2])
        return state, job.state()


def loaded_elsewhere(path: Path, tp: list[int]) -> tuple[State, State]:
    with job_on(my_device(), tp, seed=7) as job:
        assert job.load(path) is not None
        split = any(isinstance(parameter, DTensor) for parameter in job.pipeline.parameters())
        assert split == (tp[job.mesh.stage] > 1)
        state = job.state()
        job.train([2])
        return state, job.state()


@pytest.mark.parametrize(("one", "other"), [([1, 1], [1, 2]), ([1, 1], [2, 1]), ([1, 2], [1, 1])], ids=str)
def test_whole_layers_and_layers_sharded_over_a_stage(
    pool: RankPool, tmp_path: Path, one: list[int], other: list[int]
) -> None:
    """Weights and optimizer state are equal; the next step is equal up to the order of its sums."""
    states = pool.run(saved, tmp_path, one, ranks=range(sum(one)), timeout=120)
    expected, later = (merged(some) for some in zip(*states, strict=True))
    found = pool.run(loaded_elsewhere, tmp_path, other, ranks=range(sum(other)), timeout=120)
    state, later_there = (merged(some) for some in zip(*found, strict=True))
    assert_equal_states(state, expected)
    assert later_there.keys() == later.keys()
    for name, tensor in later.items():
        torch.testing.assert_close(later_there[name], tensor, rtol=1e-4, atol=1e-5)
