"""Launchers of two sites and their ranks, all real processes: success, restarts, signals, and what is lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from launchers import both, describe, is_gone, kill_hard, launch, wait_for

from ldt.cli import main
from ldt.testing.models import unsplit_training
from ldt.topology import Topology

STEPS, MICROBATCHES = 5, 3
# Rank 1 is killed in the backward of step 3 of the first attempt.
TRAIN = f"""
import os, signal
from pathlib import Path
import torch, torch.distributed as dist
import ldt
from ldt.testing import toy_chunks, toy_loss, toy_microbatches

here, attempt = Path(__file__).parent, int(os.environ["LDT_ATTEMPT"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
job = ldt.Job.from_env()
assert job.device == torch.device("cpu")
with job.connect() as mesh:
    chunks = toy_chunks(job.topology)
    mine = {{index: chunks[index] for index in job.topology.chunks_of(mesh.stage)}}
    pipeline = ldt.Pipeline(list(mine.values()), mesh, loss_fn=toy_loss if mesh.is_edge else None)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    loaded = ldt.load_checkpoint(here / "checkpoints", pipeline, optimizer)
    start = 0 if loaded is None else loaded.step
    print("attempt", attempt, "begins at", start)
    for step in range(start, {STEPS}):
        if attempt == 0 and step == 3 and dist.get_rank() == 1:
            chunks[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        pipeline.step(toy_microbatches({MICROBATCHES}, seed=step) if mesh.is_edge else None)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            ldt.save_checkpoint(here / "checkpoints", pipeline, optimizer, step=step + 1)
    for index, chunk in mine.items():
        torch.save(chunk.state_dict(), here / f"chunk-{{index}}.pt")
dist.destroy_process_group()
"""
# Ranks that import nothing. Each has a child in its session, and notes both and its signals.
STUB = """
import os, signal, subprocess, sys, time
from pathlib import Path
here, rank, attempt = Path(__file__).parent, os.environ["RANK"], int(os.environ["LDT_ATTEMPT"])
def note(number, frame):
    print("got", signal.Signals(number).name)
    if number == signal.SIGINT and rank == "0":
        (here / "interrupted").touch()
        time.sleep(0.5)
        sys.exit(5)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
(here / f"pids-{attempt}-{rank}").write_text(f"{os.getpid()} {child.pid}")
print("up")
sys.stderr.write("no end")
"""
WAIT = """
while not (rank == "1" and (here / "interrupted").exists()):
    time.sleep(0.05)
sys.exit(6)
"""


def pids(folder: Path) -> list[int]:
    return [int(pid) for file in folder.glob("pids-*") for pid in file.read_text().split()]


def lines(text: str, start: str) -> list[str]:
    return [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]


def test_a_killed_rank_restarts_both_sites_from_the_last_checkpoint(tmp_path: Path) -> None:
    with both(describe(tmp_path, TRAIN), "--max-restarts", "2") as (edge, cloud):
        assert [edge.status(), cloud.status()] == [0, 0], edge.text + cloud.text
    for text, rank in ((edge.text, "edge 0"), (cloud.text, "cloud 1")):
        assert lines(text, f"[{rank}] attempt ") == ["0 begins at 0", "1 begins at 2"], text
    (killed, succeeded) = (
        lines(cloud.text, "[cloud] rank 1 was killed by SIGKILL"),
        lines(cloud.text, "[cloud] rank 1 exited with 0"),
    )
    assert [len(killed), len(succeeded)] == [1, 1]
    assert (
        "RemoteStageError: rank 1 (stage 1, replica 0) failed first" in edge.text
    )  # it had the time to say so
    for index, chunk in enumerate(unsplit_training(Topology([1, 1]), STEPS, MICROBATCHES)):
        weights = torch.load(tmp_path / f"chunk-{index}.pt")
        for name, tensor in chunk.state_dict().items():
            assert torch.equal(weights[name], tensor), f"chunk {index}, {name}"


@pytest.mark.parametrize(
    ("number", "restarts", "statuses"), [(signal.SIGINT, 0, [130, 6]), (signal.SIGTERM, 3, [143, 137])]
)
def test_a_signal_at_one_site_ends_all(
    tmp_path: Path, number: int, restarts: int, statuses: list[int]
) -> None:
    """SIGINT, on which both ranks end, and SIGTERM, on which none does: they are killed after the grace."""
    name = signal.Signals(number).name
    with both(describe(tmp_path, STUB + WAIT), "--grace", "0.3", "--max-restarts", str(restarts)) as (
        edge,
        cloud,
    ):
        wait_for(lambda: "up" in edge.text and "up" in cloud.text, lambda: edge.text + cloud.text)
        edge.kill(number)
        assert [edge.status(), cloud.status()] == statuses, edge.text + cloud.text
    assert lines(edge.text, "[edge 0] got ")[0] == name
    assert f"[edge] ended by {name}" in edge.text
    assert f"[cloud] the job is over: {name} at edge" in cloud.text
    assert lines(cloud.text, "[cloud 1] got ") == ["SIGTERM"] * (statuses[1] == 137)
    assert "[edge 0] no end\n" in edge.text
    assert "attempt 1" not in edge.text + cloud.text
    assert len(pids(tmp_path)) == 4
    wait_for(lambda: all(map(is_gone, pids(tmp_path))))


def test_the_exit_status_is_that_of_the_first_failing_rank(tmp_path: Path) -> None:
    """Rank 2 fails; rank 1 beside it and rank 0 in the other site have the time to end by themselves."""
    fail = 'if rank == "2":\n    sys.exit(3)\ntime.sleep(0.2)\nsys.exit(4 if rank == "1" else 0)\n'
    file = describe(tmp_path, STUB + fail, [1, 2])
    with both(file, "--max-restarts", "1") as (edge, cloud):
        assert [edge.status(), cloud.status()] == [1, 3], edge.text + cloud.text
    for attempt in range(2):
        assert f"[cloud] rank 2 started: stage 1, attempt {attempt}" in cloud.text
    assert len(lines(cloud.text, "[cloud] rank 1 exited with 4")) == 2
    assert lines(edge.text, "[edge] the job is over: ") == [
        "a rank of cloud failed in attempt 1, the last one"
    ]
    assert "got" not in edge.text + cloud.text
    wait_for(lambda: all(map(is_gone, pids(tmp_path))))  # also what they had started


def test_a_site_may_have_a_command_instead_of_the_script(tmp_path: Path) -> None:
    file = describe(tmp_path, "print('the script')")
    command = "command = ['-c', 'import sys; print(sys.argv[1:])', 'a b']"
    file.write_text(file.read_text() + command)  # into the last table, that of the cloud
    with both(file) as (edge, cloud):
        assert [edge.status(), cloud.status()] == [0, 0], edge.text + cloud.text
    assert "[edge 0] the script" in edge.text
    assert "[cloud 1] ['a b']" in cloud.text
    (tmp_path / "train.py").unlink()
    assert main(["launch", str(file), "--site", "edge"]) == 2


def test_a_killed_launcher_leaves_no_rank_and_may_come_back(tmp_path: Path) -> None:
    file = describe(tmp_path, STUB + "while attempt == 0:\n    time.sleep(0.1)\n")
    options = ("--grace", "0.2", "--max-restarts", "1")
    with both(file, *options) as (edge, cloud):
        wait_for(lambda: "up" in edge.text and "up" in cloud.text, lambda: edge.text + cloud.text)
        kill_hard(cloud)
        rank = int((tmp_path / "pids-0-1").read_text().split()[0])
        wait_for(lambda: is_gone(rank))
        with launch(file, "cloud", *options) as again:
            assert [edge.status(), again.status()] == [0, 0], edge.text + again.text
    assert "[cloud] rank 1 started: stage 1, attempt 1" in again.text
    for pid in pids(tmp_path):
        if pid != int((tmp_path / "pids-0-1").read_text().split()[1]):  # nobody was left to end that one
            wait_for(lambda pid=pid: is_gone(pid))
    os.kill(int((tmp_path / "pids-0-1").read_text().split()[1]), signal.SIGKILL)


def test_the_store_is_lost_with_its_launcher(tmp_path: Path) -> None:
    with both(describe(tmp_path, STUB + WAIT), "--grace", "0.2") as (edge, cloud):
        wait_for(lambda: "up" in edge.text and "up" in cloud.text, lambda: edge.text + cloud.text)
        kill_hard(edge)
        assert cloud.status() == 137
    assert re.search(
        r"\[cloud\] the job is over: the launchers' store at 127.0.0.1 port \d+ is lost", cloud.text
    )
    os.kill(int((tmp_path / "pids-0-0").read_text().split()[1]), signal.SIGKILL)
    wait_for(lambda: all(map(is_gone, pids(tmp_path))))


def test_descriptions_that_differ_are_refused_on_both_sites(tmp_path: Path) -> None:
    file = describe(tmp_path, STUB)
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "job.toml"
    other.write_text(file.read_text().replace("script", 'arguments = ["5"]\nscript'))
    (tmp_path / "other" / "train.py").touch()
    with launch(file, "edge") as edge, launch(other, "cloud") as cloud:
        assert [edge.status(), cloud.status()] == [1, 1], edge.text + cloud.text
    assert f"{file}: arguments must be the same on all sites, but differs at cloud" in edge.text
    assert f"{other}: " not in edge.text  # a site's paths stay there
    assert f"{file}: " not in cloud.text
    assert "[cloud] the job is over: " in cloud.text
    assert "started" not in edge.text + cloud.text


def test_a_site_that_does_not_come_is_named(tmp_path: Path) -> None:
    file = describe(tmp_path, STUB)
    with launch(file, "cloud", "--timeout", "0.5") as cloud:
        assert cloud.status() == 1
    assert "did not answer within 0.5 s" in cloud.text
    assert "start the launcher of edge" in cloud.text
    with launch(file, "edge", "--timeout", "0.5") as edge:
        assert edge.status() == 1
    assert "[edge] the job is over: cloud did not start within 0.5 s" in edge.text


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    file = describe(tmp_path, STUB)
    port = int(re.findall(r"port = (\d+)", file.read_text())[0]) + 1
    with socket.create_server(("127.0.0.1", port)), launch(file, "edge") as edge:
        assert edge.status() == 1
    assert f"there can be no store at 127.0.0.1 port {port}: " in edge.text


@pytest.mark.slow
def test_a_site_that_has_succeeded_does_not_wait_for_a_lost_launcher(tmp_path: Path) -> None:
    file = describe(tmp_path, STUB + "while rank == '1':\n    time.sleep(0.05)\n")
    with both(file, "--timeout", "3") as (edge, cloud):
        waits = "[edge] all ranks here have succeeded; waiting for those of other sites"
        wait_for(lambda: waits in edge.text, lambda: edge.text + cloud.text)
        time.sleep(4.0)
        assert edge.process.is_alive(), "ranks of the cloud may take longer"
        kill_hard(cloud)
        assert edge.status() == 1
    assert "but the launcher of cloud was silent for 3 s and has not said the same: look at it" in edge.text
    os.kill(int((tmp_path / "pids-0-1").read_text().split()[1]), signal.SIGKILL)
