"""Checksums of checkpoint files: a single changed bit is an error that names the file."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_jobs import Job, as_of_an_earlier_version, assert_equal_states
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import HOSTILE, mutated_json

import ldt
from ldt.topology import Topology
from ldt.train.checkpoint import random_states
from ldt.train.checkpoint.files import parse_json
from ldt.train.checkpoint.stage_reader import StageReader

STAGE = Path("step-1", "stage-0")
FILES = ["stage.json", *(f"rank-0.0/{name}" for name in (".metadata", "__0_0.distcp", "random_states.json"))]
FILES += ["rank-0.0/checksums.json"]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job(Topology([1])) as made:
        made.train([0])
        yield made


@pytest.fixture(scope="module")
def saved(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    job.save(path, 1, position={"sample": 3})
    return path


@pytest.mark.parametrize("name", FILES)
def test_one_bit(job: Job, saved: Path, tmp_path: Path, name: str) -> None:
    """Change a bit at both ends and at random positions; load and merge must detect it."""
    file = saved / STAGE / name
    whole = file.read_bytes()
    drawn = random.Random(name)
    places = [0, 8 * len(whole) - 1, *(drawn.randrange(8 * len(whole)) for _ in range(4))]
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            with pytest.raises(ldt.CheckpointError, match=file.name.replace(".", r"\.")):
                job.load(saved)
            with pytest.raises(ldt.CheckpointError, match=file.name.replace(".", r"\.")):
                ldt.merge_checkpoint(saved, tmp_path / "merged")
        finally:
            file.write_bytes(whole)
    assert job.load(saved) == ldt.LoadedCheckpoint(1, {"sample": 3})


@pytest.mark.parametrize("name", ["__0_0.distcp", "random_states.json", ".metadata"])
def test_files_that_grew(job: Job, saved: Path, name: str) -> None:
    file = saved / STAGE / "rank-0.0" / name
    whole = file.read_bytes()
    file.write_bytes(whole + b" ")
    try:
        with pytest.raises(
            ldt.CheckpointError, match=rf"damaged: expected {len(whole)} bytes, got {len(whole) + 1}"
        ):
            job.load(saved)
    finally:
        file.write_bytes(whole)


def test_files_of_another_save(job: Job, saved: Path, tmp_path: Path) -> None:
    """The files are complete, but of another save: weights would come from two steps."""
    job.save(tmp_path, 1)
    shutil.rmtree(tmp_path / STAGE / "rank-0.0")
    shutil.copytree(saved / STAGE / "rank-0.0", tmp_path / STAGE / "rank-0.0")
    with pytest.raises(ldt.CheckpointError, match=r"checksums\.json is damaged: it is of another save"):
        job.load(tmp_path)


def test_sums_that_are_missing(job: Job, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / STAGE / "rank-0.0" / "checksums.json").unlink()
    with pytest.raises(ldt.CheckpointError, match=r"No such file .*checksums\.json"):
        job.load(tmp_path)


def test_what_an_earlier_version_wrote(
    job: Job, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    as_of_an_earlier_version(tmp_path)
    job.load(saved)
    state = job.state()
    job.train([1])
    with caplog.at_level("INFO", logger="ldt"):
        assert job.load(tmp_path) == ldt.LoadedCheckpoint(1, {"sample": 3})
    assert "has no checksums: it is of an earlier version" in caplog.text
    assert_equal_states(job.state(), state)
    assert ldt.merge_checkpoint(tmp_path, tmp_path / "merged") == 1


def test_each_byte_is_read_once(job: Job, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    check = StageReader.part

    def count(self: StageReader, name: str) -> object:
        part = check(self, name)
        monkeypatch.setattr(part, "check", lambda name, offset, data: seen.append((offset, len(data))))
        return part

    monkeypatch.setattr(StageReader, "part", count)
    job.load(saved)
    assert len(seen) == len(set(seen))
    assert sum(length for _, length in seen) == (saved / STAGE / FILES[2]).stat().st_size


# -- files without checksums, or with other ones -------------------------------------------------------------------


@pytest.fixture(scope="module")
def old(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("old") / "checkpoint"
    shutil.copytree(saved, path)
    as_of_an_earlier_version(path)
    return path


@pytest.mark.parametrize("name", ["stage.json", "rank-0.0/random_states.json"])
@settings(suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_change_loads_or_is_the_one_error(job: Job, old: Path, name: str, data: st.DataObject) -> None:
    file = old / STAGE / name
    whole = file.read_text()
    shorter = json.loads(whole)
    if "python" in shorter:
        shorter = {"python": [3, [1, 2], None], "torch": "AAAA", "numpy": ["MT19937", [1, 2], 1, 0, 0.0]}
    else:  # parts in which a small change matters
        shorter["aliases"] = {}
        shorter["optimizer"]["state"] = dict(list(shorter["optimizer"]["state"].items())[:1])
        shorter["optimizer"]["groups"] = [
            {**group, "params": group["params"][:2]} for group in shorter["optimizer"]["groups"]
        ]
    file.write_text(data.draw(mutated_json(json.dumps(shorter))))
    try:
        if name == "stage.json":
            job.load(old)
        else:
            states = parse_json(file, file.read_bytes(), dict[str, Any])
            random_states.restorer(states, torch.device("cpu"), file)()
    except ldt.CheckpointError as error:
        assert len(str(error)) < 3000  # noqa: PT017 (it need not be raised)
    finally:
        file.write_text(whole)


@pytest.mark.parametrize("name", FILES[:1] + FILES[3:])
def test_what_is_nothing_of_the_kind(job: Job, saved: Path, name: str) -> None:
    file = saved / STAGE / name
    whole = file.read_bytes()
    try:
        for text in HOSTILE:
            file.write_bytes(text.encode())
            with pytest.raises(ldt.CheckpointError, match=file.name):
                job.load(saved)
    finally:
        file.write_bytes(whole)


def test_what_could_not_be_read_again_is_not_written(job: Job, tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(150):
        deep = [deep]
    with pytest.raises(ldt.CheckpointError, match="position is nested too deeply"):
        job.save(tmp_path, 1, position=deep)
    assert not list(tmp_path.iterdir())
