"""Saves and loads that are refused: every rank raises the reason, nothing changes, and the mesh stays usable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_jobs import Block, Job, assert_equal_states

import ldt
from ldt.testing import RankPool
from ldt.topology import Topology

WORLD_SIZE = 3
SHAPE = Topology([1, 1, 1])
Refuse = Callable[[Job, Path, Path], Any]


def refused(edge: Path, cloud: Path, name: str) -> list[str]:
    """Return each rank's error. Only the edge sees its folder; ``name`` is a function of this module that must fail."""
    with Job(SHAPE) as job:
        job.train([0])
        job.save(edge if job.mesh.is_edge else cloud, 1)
        job.train([1])
        before = job.state()
        with pytest.raises((ldt.LdtError, TypeError, ValueError)) as caught:
            globals()[name](job, edge, cloud)
        assert_equal_states(job.state(), before)
        job.train([2])
        assert job.load([edge, cloud]) == ldt.LoadedCheckpoint(1)
        return [type(caught.value).__name__, str(caught.value)]


def other_steps(job: Job, edge: Path, cloud: Path) -> Any:
    job.save(cloud, 5 + job.mesh.stage)


def no_number(job: Job, edge: Path, cloud: Path) -> Any:
    job.save(cloud, "5")  # type: ignore[arg-type]


def keeps_none(job: Job, edge: Path, cloud: Path) -> Any:
    job.save(cloud, 5, keep=0)


def tensor_as_position(job: Job, edge: Path, cloud: Path) -> Any:
    job.save(cloud, 5, position={"order": [torch.zeros(2)]} if job.mesh.is_edge else None)


def foreign_parameter(job: Job, edge: Path, cloud: Path) -> Any:
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(5))])
    ldt.save_checkpoint(cloud, job.pipeline, other if job.mesh.stage == 1 else job.optimizer, step=5)


def one_name_twice(job: Job, edge: Path, cloud: Path) -> Any:
    job.save(cloud, 5, names=lambda chunk, name: "w")


def no_folder(job: Job, edge: Path, cloud: Path) -> Any:
    cloud.parent.joinpath("file").touch()
    job.save(cloud.parent / "file", 5)


def edge_alone(job: Job, edge: Path, cloud: Path) -> Any:
    job.load(edge if job.mesh.stage == 1 else [edge, cloud])


def absent_step(job: Job, edge: Path, cloud: Path) -> Any:
    job.load([edge, cloud], step=3)


def names_of_chunks(job: Job, edge: Path, cloud: Path) -> Any:
    job.load([edge, cloud], names="chunk.{}.{}".format)


def other_names(job: Job, edge: Path, cloud: Path) -> Any:
    job.load([edge, cloud], names=lambda chunk, name: f"model.{name}")


def other_shape(job: Job, edge: Path, cloud: Path) -> Any:
    swapped = {"norm": "up", "up": "norm"}

    def names(chunk: int, name: str) -> str:
        head, part, tail = name.rsplit(".", 2) if name.endswith("bias") else ("", "", name)
        return f"{head}.{swapped.get(part, part)}.{tail}" if head else name

    job.load([edge, cloud], names=names)


def more_extra(job: Job, edge: Path, cloud: Path) -> Any:
    job.extra["scaler"] = ldt.GradScaler(job.mesh)
    try:
        job.load([edge, cloud])
    finally:
        del job.extra["scaler"]


def other_groups(job: Job, edge: Path, cloud: Path) -> Any:
    """Parameters saved in two groups with two learning rates are in one group."""
    optimizer = torch.optim.AdamW(job.pipeline.parameters())
    ldt.load_checkpoint([edge, cloud], job.pipeline, optimizer)


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (other_steps, "equal steps: ranks [1, 2] differ from this rank"),
        (no_number, "step must be a whole number, got str"),
        (keeps_none, "keep must be at least 1 and less than 1e+18, got 0"),
        (tensor_as_position, " is a Tensor, which a checkpoint cannot keep"),
        (foreign_parameter, "a parameter of shape [5] that no chunk of this rank has"),
        (one_name_twice, "two tensors of this rank would be saved as w"),
        (no_folder, "expected the folder of a checkpoint, got a file"),
        (
            edge_alone,
            "stages [0] of tp=1,1,1 dp=1 edge_dp=1 laps=1, but not [1, 2]: give the paths of those, too",
        ),
        (absent_step, "step 3 is missing or incomplete: the complete steps are [1]"),
        (names_of_chunks, "these names are those of chunks, which fit no other split"),
        (other_names, "is it of this model, named the same way?"),
        (other_shape, "has shape [36] here, [16] in"),
        (more_extra, "the checkpoint has no state of 'scaler'"),
        (other_groups, "are in one group of the optimizer, but were saved with"),
    ],
)
def test_what_is_refused(pool: RankPool, tmp_path: Path, attempt: Refuse, sentence: str) -> None:
    answers = pool.run(refused, tmp_path / "edge", tmp_path / "cloud", attempt.__name__)
    assert any(sentence in text for _, text in answers), answers
    assert all(sentence in text or kind in ("LdtError", "CheckpointError") for kind, text in answers), answers
    assert [rank for rank, (_, text) in enumerate(answers) if "order" in text] in ([], [0]), (
        "a key of the edge's"
    )
    assert not [entry for entry in tmp_path.rglob("*") if entry.name.startswith((".stage", "step-5"))]


def not_in_the_optimizer(path: Path) -> list[str]:
    """Save while a stage is frozen, load after it was unfrozen."""
    with Job(SHAPE, frozen=[1]) as job:
        job.save(path, 1)
    with Job(SHAPE) as job:
        with pytest.raises(ldt.LdtError) as caught:
            ldt.load_checkpoint(path, job.pipeline, job.optimizer)
        assert ldt.load_checkpoint(path, job.pipeline) is not None
        return [type(caught.value).__name__, str(caught.value)]


def test_an_optimizer_that_was_not_saved(pool: RankPool, tmp_path: Path) -> None:
    kinds, texts = zip(*pool.run(not_in_the_optimizer, tmp_path), strict=True)
    assert set(kinds) == {"CheckpointError"}
    assert all(text.startswith("rank 1 (stage 1) cannot finish") for text in (texts[0], texts[2]))
    assert all("the checkpoint has no optimizer state of blocks.2." in text for text in texts)


def rounds(edge: Path, cloud: Path) -> list[Any]:
    """Load without a save; keep the last two saves; save a step twice; lose a stage."""
    with Job(SHAPE) as job:
        mine = edge if job.mesh.is_edge else cloud
        assert job.load(mine) is None
        for step in (1, 2, 3, 2):
            job.save(mine, step)
            job.train([step])
            job.mesh.control.all_gather(None)
        loaded = [job.load(mine), job.load(mine, step=2)]
        job.mesh.control.all_gather(None)
        if job.mesh.stage == 1:
            (cloud / "step-3" / "stage-1").rename(cloud / "lost")
        job.mesh.control.all_gather(None)
        return [*loaded, job.load(mine)]


def test_which_saves_are_kept_and_which_is_loaded(pool: RankPool, tmp_path: Path) -> None:
    steps = pool.run(rounds, tmp_path / "edge", tmp_path / "cloud")
    assert steps == [[ldt.LoadedCheckpoint(step) for step in (3, 2, 2)]] * 3
    for folder in (tmp_path / "edge", tmp_path / "cloud"):
        names = {entry.name for entry in folder.iterdir()} - {"lost"}
        assert names == {"step-2", "step-2.1", "step-3"}


def test_state_of_a_module_that_is_no_tensor(tmp_path: Path) -> None:
    class Stateful(Block):
        def get_extra_state(self) -> Any:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    with ldt.connect(Topology([1])) as mesh:
        pipeline = ldt.Pipeline([Stateful(0.0), Block(0.0)], mesh, loss_fn=torch.nn.functional.mse_loss)
        with pytest.raises(ldt.LdtError, match="_extra_state of chunk 0 is extra state of a module, a dict"):
            ldt.save_checkpoint(tmp_path, pipeline, step=0)
        assert not list(tmp_path.iterdir())
