"""An unreadable save is not treated as absent: every rank raises, and nothing is removed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_jobs import Job, assert_equal_states

import ldt
from ldt.testing import RankPool
from ldt.topology import Topology
from ldt.train.checkpoint import catalog as catalogs
from ldt.train.checkpoint.catalog import catalog, kept_saves
from ldt.train.checkpoint.layout import Save

WORLD_SIZE = 3
SHAPE = Topology([1, 1, 1])
RECORD = "step-1/stage-1/stage.json"


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def replace_by_loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def move_away(file: Path) -> None:
    file.rename(file.with_name("moved"))


def empty(file: Path) -> None:
    file.write_bytes(b"")


def link_to_nowhere(file: Path) -> None:
    move_away(file)
    file.symlink_to("nowhere")


def take_from_another_stage(file: Path) -> None:
    file.write_bytes((file.parent.parent / "stage-2" / file.name).read_bytes())


Damage = Callable[[Path], None]


def outcomes(path: Path, cases: list[tuple[str, str, bool]]) -> list[list[str]]:
    """Return what load raises on this rank for each case: the damage, the file, and whether an older save exists."""
    with Job(SHAPE) as job:
        found = []
        for number, (damage, file, older) in enumerate(cases):
            mine = path / str(number)
            if older:
                job.save(mine, 0)
            job.save(mine, 1)
            job.mesh.control.all_gather(None)
            if job.mesh.stage == 1:
                globals()[damage](next(mine.glob(file)))
            job.mesh.control.all_gather(None)
            before = job.state()
            try:
                found.append(["loaded", str(getattr(job.load(mine), "step", None))])
            except ldt.CheckpointError as error:
                found.append([type(error).__name__, str(error)])
            assert_equal_states(job.state(), before)
            assert not older or job.load(mine, step=0) == ldt.LoadedCheckpoint(0)
        job.train([0])
        return found


CASES = [
    (cut, RECORD, "stage.json is damaged"),
    (empty, RECORD, "stage.json is damaged"),
    (move_away, RECORD, "step-1/stage-1/stage.json cannot be read: No such file"),
    (replace_by_loop, RECORD, "step-1/stage-1/stage.json cannot be read: Too many levels"),
    (replace_by_folder, RECORD, "step-1/stage-1/stage.json"),
    (take_from_another_stage, RECORD, "stage.json is that of stage 2"),
    (link_to_nowhere, "step-1/stage-1", "step-1/stage-1/stage.json cannot be read: No such file"),
    (link_to_nowhere, "step-1", "step-1 cannot be read: No such file"),
    (cut, "step-1/stage-1/rank-0.0/*.distcp", "distcp is damaged: it is cut short"),
    (cut, "step-1/stage-1/rank-0.0/.metadata", ".metadata is damaged"),
    (move_away, "step-1/stage-1/rank-0.0/.metadata", "cannot be read: No such file"),
    (cut, "step-1/stage-1/rank-0.0/random_states.json", "random_states.json is damaged"),
    (move_away, "step-1/stage-1/rank-0.0/random_states.json", "cannot be read: No such file"),
    (cut, "step-1/stage-1/rank-0.0/checksums.json", "checksums.json is damaged"),
]


def test_the_only_save_is_damaged(pool: RankPool, tmp_path: Path) -> None:
    """Otherwise the job would start at step 0, and eventually remove what could have been repaired."""
    answers = pool.run(outcomes, tmp_path, [(damage.__name__, file, False) for damage, file, _ in CASES])
    for number, (_, _, sentence) in enumerate(CASES):
        kinds, texts = zip(*(answer[number] for answer in answers), strict=True)
        assert set(kinds) <= {"CheckpointError", "StorageError"}, texts
        assert all(sentence in text for text in texts), (sentence, texts)
        assert all(
            "and no other step is complete: " in text and "or move it away to continue without" in text
            for text in texts
        )
    for number, (damage, file, sentence) in enumerate(CASES):
        if "random_states" in file:
            continue  # the merged file does not use it
        with pytest.raises(ldt.CheckpointError, match=sentence.replace(".", r"\.")):
            ldt.merge_checkpoint(tmp_path / str(number), tmp_path / "merged")
        assert not (tmp_path / "merged").exists(), damage


def test_an_older_save_is_named_whatever_is_damaged(pool: RankPool, tmp_path: Path) -> None:
    answers = pool.run(outcomes, tmp_path, [(damage.__name__, file, True) for damage, file, _ in CASES[7::2]])
    for text in (text for answer in answers for _, text in answer):
        assert "step-1 exists but cannot be used, and the complete steps are [0]: " in text
        assert text.endswith("Repair it, move it away, or load another step, such as step=0"), text


EDGE_FILES = ["stage.json", "rank-0.0/.metadata", "rank-0.0/__0_0.distcp", "rank-0.0/random_states.json"]
EDGE_FILES += ["rank-0.0/checksums.json"]


def folder_of_the_edge(path: Path) -> list[str]:
    """Return this rank's errors for damaged or missing files of the edge, in a folder that others do not use."""
    with Job(SHAPE) as job:
        mine = path / ("secret" if job.mesh.is_edge else "cloud")
        job.save(mine, 1)
        texts = []
        for name, damage in zip(EDGE_FILES, itertools.cycle([cut, move_away]), strict=False):
            file = path / "secret" / "step-1" / "stage-0" / name
            whole = file.read_bytes() if job.mesh.is_edge else b""
            if job.mesh.is_edge:
                damage(file)
            with pytest.raises(ldt.CheckpointError) as caught:
                job.load(mine)
            texts.append(str(caught.value))
            if job.mesh.is_edge:
                file.write_bytes(whole)
        assert job.load(mine) == ldt.LoadedCheckpoint(1)
        return texts


def test_paths_of_the_edge_stay_there(pool: RankPool, tmp_path: Path) -> None:
    """All ranks learn the file's name, relative to the folder of the save."""
    edge, *cloud = pool.run(folder_of_the_edge, tmp_path)
    for texts in cloud:
        assert not [text for text in texts if "secret" in text]
    for texts in (edge, *cloud):
        for text, name in zip(texts, EDGE_FILES, strict=True):
            assert f"step-1/stage-0/{name}" in text


def sees_another_disk(path: Path) -> list[str]:
    """One rank's copy of the edge's folder is damaged; the others do not see that folder, or see another copy."""
    with Job(SHAPE) as job:
        mine = path / str(job.mesh.stage)
        job.save(mine, 1)
        job.mesh.control.all_gather(None)
        if job.mesh.stage == 2:
            cut(mine / "step-1" / "stage-2" / "stage.json")
        job.mesh.control.all_gather(None)
        with pytest.raises(ldt.LdtError) as caught:
            job.load([mine, path / "0"])
        return [str(caught.value)]


def test_one_rank_sees_the_damage(pool: RankPool, tmp_path: Path) -> None:
    answers = pool.run(sees_another_disk, tmp_path)
    assert all("step-1 exists but cannot be used" in text for (text,) in answers), answers
    assert all("stage-2/stage.json is damaged" in text for (text,) in answers), answers


@pytest.fixture
def job(tmp_path: Path) -> Any:
    with Job(Topology([1])) as made:
        yield made


def test_a_damaged_save_counts_as_one_of_those_that_are_kept(job: Job, tmp_path: Path) -> None:
    for step in (1, 2):
        job.save(tmp_path, step)
    cut(tmp_path / "step-2" / "stage-0" / "stage.json")
    left = []
    for step in (3, 4, 5):
        job.save(tmp_path, step)
        left.append({entry.name for entry in tmp_path.iterdir()})
    assert left == [{"step-1", "step-2", "step-3"}, {"step-3", "step-4"}, {"step-4", "step-5"}]


def test_a_step_that_is_asked_for_and_damaged(job: Job, tmp_path: Path) -> None:
    for step in (1, 2):
        job.save(tmp_path, step)
    cut(tmp_path / "step-2" / "stage-0" / "stage.json")
    for step in (2, None):
        with pytest.raises(
            ldt.CheckpointError, match=r"step-2 exists but cannot be used, and the complete steps are \[1\]"
        ):
            job.load(tmp_path, step=step)
    assert job.load(tmp_path, step=1) == ldt.LoadedCheckpoint(1)
    job.save(tmp_path, 3)
    assert job.load(tmp_path) == ldt.LoadedCheckpoint(3)


@pytest.mark.parametrize("make", [replace_by_loop, link_to_nowhere])
def test_a_folder_that_cannot_be_read(job: Job, tmp_path: Path, make: Damage) -> None:
    folder = tmp_path / "checkpoints"
    assert job.load(folder) is None
    job.save(folder, 1)
    if make is replace_by_loop:
        move_away(folder)
        folder.symlink_to(folder)
    else:
        make(folder)
    with pytest.raises(ldt.CheckpointError, match=f"the folder of the checkpoint cannot be read.*{folder}"):
        job.load(folder)
    with pytest.raises(ldt.CheckpointError, match="the folder of the checkpoint cannot be read"):
        job.save(folder, 2)


def test_no_permission(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job.save(tmp_path, 1)

    def refuse(folder: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(folder / "stage.json"))

    monkeypatch.setattr(catalogs.StageManifest, "read", staticmethod(refuse))
    with pytest.raises(
        ldt.CheckpointError, match=r"step-1/stage-0/stage\.json cannot be read: Permission denied"
    ):
        job.load(tmp_path)


def test_what_another_rank_removes_is_not_damaged(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.save(tmp_path, 1)
    read = catalogs.StageManifest.read

    def removed(folder: Path) -> Any:
        (tmp_path / "step-1").rename(tmp_path / ".removed-step-1")
        return read(folder)

    monkeypatch.setattr(catalogs.StageManifest, "read", staticmethod(removed))
    assert catalog([tmp_path]) == [[1, 0, []]]


def test_which_saves_are_kept() -> None:
    def seen(step: int, *damage: str, of: int = 1) -> list[Any]:
        return [step, 0, [[0, of, "a"]], *damage]

    found = [[seen(1), seen(2, "damage"), seen(3), seen(4, of=2), seen(5, "damage"), seen(9)]]
    assert kept_saves(found, Save(6), 1) == []
    assert kept_saves(found, Save(6), 2) == [Save(3), Save(5)]
    assert kept_saves(found, Save(6), 3) == [Save(1), Save(2), Save(3), Save(5)]
