"""However a save ends, the last complete one can be loaded: kills at every moment, a full disk."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_jobs import Job
from safetensors.torch import load_file

import ldt
from ldt.testing import RankError, RankPool, paced
from ldt.topology import Topology
from ldt.train.checkpoint.catalog import catalog, complete_saves

WORLD_SIZE = 3
SHAPE = Topology([1, 2])
MOMENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def fill(job: Job, step: int) -> None:
    """Set weights that show their step."""
    with torch.no_grad():
        for parameter in job.pipeline.parameters():
            parameter.fill_(step)


def filled_with(job: Job) -> set[float]:
    return {float(value) for p in job.pipeline.parameters() for value in _local(p.detach()).unique()}


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


class KillAt:
    """Kills this process before its n-th change in ``folder``."""

    def __init__(self, folder: Path, number: int, moments: Sequence[str] = MOMENTS) -> None:
        self.folder, self.left, self.moments, self.on = str(folder), number, moments, False
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in self.moments and self.concerns(arguments[0]) and arguments[1] != "r":
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def concerns(self, place: object) -> bool:
        """``shutil.rmtree`` identifies what it removes by the descriptor of an open folder."""
        return isinstance(place, int) or not str(place).startswith("/") or str(place).startswith(self.folder)


def save_until_killed(folder: Path, moment: int) -> None:
    """Save twice, then a third time until killed at that moment; the third save would finally remove the second."""
    torch.set_num_threads(1)
    with Job(Topology([1])) as job:
        kill = KillAt(folder, moment)
        for step in (1, 2, 3):
            fill(job, step)
            kill.on = step == 3
            job.save(folder, step, keep=1)


@pytest.mark.slow
def test_a_kill_at_every_moment_of_a_save(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "ldt.runtime", "ldt.testing", "checkpoint_jobs"])
    newest, exit_code, moment = [], -signal.SIGKILL, 0
    while exit_code == -signal.SIGKILL:
        folder = tmp_path / str(moment)
        process = context.Process(target=save_until_killed, args=(folder, moment))
        process.start()
        process.join(60)
        exit_code = process.exitcode or 0
        steps = [save.step for save in complete_saves([catalog([folder])])]
        assert steps in ([2], [2, 3], [3])
        for step in steps:
            assert ldt.merge_checkpoint(folder, tmp_path / "merged", step=step) == step
            weights = load_file(tmp_path / "merged")
            assert {
                float(v) for name, t in weights.items() if "forwards" not in name for v in t.unique()
            } == {step}
        goes_on(folder, steps[-1])
        newest.append(steps[-1])
        moment += 1
    assert exit_code == 0
    assert moment > 15
    assert newest == sorted(newest)
    assert set(newest) == {2, 3}


def goes_on(folder: Path, step: int) -> None:
    """The next job loads it, and its first save removes what the killed job left."""
    with Job(Topology([1]), seed=7) as job:
        assert job.load(folder) == ldt.LoadedCheckpoint(step)
        assert filled_with(job) == {step}
        job.save(folder, 4, keep=1)
    assert [entry.name for entry in folder.iterdir()] == ["step-4"]
    assert [entry.name for entry in (folder / "step-4").iterdir()] == ["stage-0"]


def load_and_save(folder: Path, who: int, after: float) -> int:
    """Resume; rank ``who`` is killed ``after`` that many seconds, or if 0, when it is about to rename a stage."""
    with Job(SHAPE) as job:
        path = [folder / str(stage) for stage in range(SHAPE.num_stages)]
        loaded = job.load(path)
        first = 0 if loaded is None else loaded.step
        assert loaded is None or filled_with(job) == {first}
        if job.mesh.rank == who and not after:
            KillAt(folder, 1, ["os.rename"]).on = True  # the first one is the metadata file of torch
        elif job.mesh.rank == who:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for step in range(first + 1, first + 1000):
            fill(job, step)
            job.save(path[job.mesh.stage], step)
            if who < 0:
                break
    return first


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path: Path) -> None:
    generator = random.Random(0)
    with RankPool(WORLD_SIZE) as pool:
        last = pool.run(load_and_save, tmp_path, -1, 0.0)[0]
        moments = [(1, 0.0), *((who, generator.uniform(0.05, 0.6)) for who in range(WORLD_SIZE))]
        for who, after in moments:
            with pytest.raises(RankError, match="died with exit code -9") as caught:
                pool.run(load_and_save, tmp_path, who, after)
            assert "were not done" not in str(caught.value), "the others hear of it"
            steps = pool.run(load_and_save, tmp_path, -1, 0.0)
            assert len(set(steps)) == 1
            assert steps[0] >= last
            last = steps[0] + 1


def folders_apart(path: Path) -> list[str]:
    with Job(SHAPE) as job:
        with pytest.raises(ldt.LdtError) as caught:
            job.save(path / str(job.mesh.rank), 1)
        job.mesh.control.all_gather(None)
        job.train([0])
        return [type(caught.value).__name__, str(caught.value)]


def test_ranks_of_a_stage_that_see_different_folders(pool: RankPool, tmp_path: Path) -> None:
    for kind, text in pool.run(folders_apart, tmp_path):
        assert kind in ("CheckpointError", "StorageError")
        assert "rank-0.1/" in text
        assert "all ranks of stage 1 must be given the same folder, and all must see it" in text
    assert not list(tmp_path.glob("*/*"))


def slow_disk(path: Path) -> set[float]:
    """Rank 1 takes longer to write than the transfer timeout."""
    with Job(SHAPE, transfer_timeout=paced(1.5)) as job:
        if job.mesh.rank == 1:
            pause = paced(0.8).total_seconds()
            sys.addaudithook(
                lambda event, arguments: time.sleep(pause * (event == "open" and arguments[1] == "w"))
            )
        fill(job, 1)
        start = time.monotonic()
        job.save(path, 1)
        assert time.monotonic() - start > paced(1.5).total_seconds()
        fill(job, 2)
        assert job.load(path) == ldt.LoadedCheckpoint(1)
        return filled_with(job)


def test_a_disk_may_be_slower_than_any_transfer(tmp_path: Path) -> None:
    with RankPool(WORLD_SIZE) as pool:
        assert pool.run(slow_disk, tmp_path) == [{1}] * WORLD_SIZE


def stuck(path: Path) -> str:
    """Rank 2 is killed while it writes."""
    with Job(SHAPE) as job:
        if job.mesh.rank == 2:
            KillAt(path, 1, ["os.mkdir", "open"]).on = True
        with pytest.raises(ldt.LdtError) as caught:
            job.save(path, 1)
        return type(caught.value).__name__


def test_a_rank_that_is_gone_ends_the_save_of_the_others(tmp_path: Path) -> None:
    with RankPool(WORLD_SIZE) as pool, pytest.raises(RankError) as caught:
        pool.run(stuck, tmp_path)
    assert str(caught.value) == "rank 2 died with exit code -9", "the others raised what they should"


@contextmanager
def file_sizes_limited(limit: int) -> Iterator[None]:
    """Limit the size of files that this process writes: a larger write fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def on_a_full_disk(edge: Path, cloud: Path, who: list[int], filler: Path | None) -> str:
    """Save, fail to save on the ranks ``who`` or because ``filler`` fills the disk, and save once there is room."""
    with Job(SHAPE) as job:
        mine = edge if job.mesh.is_edge else cloud
        fill(job, 1)
        job.save(mine, 1)
        fill(job, 2)
        job.mesh.control.all_gather(None)
        if filler is not None and job.mesh.rank == 1:
            fill_disk(filler)
        job.mesh.control.all_gather(None)
        with pytest.raises(ldt.LdtError) as caught, file_sizes_limited(4096 if job.mesh.rank in who else -1):
            job.save(mine, 2)
        job.mesh.control.all_gather(None)
        assert not [entry for entry in mine.rglob("*") if entry.name.startswith((".stage", "step-2"))]
        assert job.load([edge, cloud]) == ldt.LoadedCheckpoint(1)
        assert filled_with(job) == {1}
        job.train([0])
        if filler is not None and job.mesh.rank == 1:
            filler.unlink()
        job.save(mine, 2)
        assert job.load([edge, cloud]) == ldt.LoadedCheckpoint(2)
        return f"{type(caught.value).__name__}: {caught.value}"


def fill_disk(filler: Path) -> None:
    """Leave room for what precedes the tensors, so that the disk is full while these are written."""
    with filler.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(1 << 12))
    os.truncate(filler, filler.stat().st_size - (80 << 10))


@pytest.mark.parametrize("who", [[0], [1], [2], [1, 2], [0, 1, 2]])
def test_a_disk_that_is_full(pool: RankPool, tmp_path: Path, who: list[int]) -> None:
    texts = pool.run(on_a_full_disk, tmp_path / "edge", tmp_path / "cloud", who, None)
    for rank, text in enumerate(texts):
        assert text.startswith("StorageError: " if rank in who else "CheckpointError: ")
        failed = rank if rank in who else who[0]
        assert (
            f"rank {failed} cannot write stage {min(failed, 1)} of the checkpoint of step 2: File too" in text
        )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "ldt-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_small_disk(pool: RankPool, tmp_path: Path, small_disk: Path) -> None:
    texts = pool.run(on_a_full_disk, tmp_path / "edge", small_disk, [], small_disk / "filler")
    assert texts[0].startswith("CheckpointError: rank ")
    assert "cannot finish save_checkpoint()" in texts[0]
    assert any("No space left on device" in text for text in texts[1:])
