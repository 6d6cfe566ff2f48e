"""The text example as users start it: under torchrun, compared with one process, interrupted, with wrong arguments."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ldt.testing import in_time

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")
pytest.importorskip("tqdm")

SCRIPT = str(Path(__file__).parents[2] / "examples" / "train_text.py")
TINY_SIZES = {"steps": 4, "microbatches": 3, "batch": 1, "sequence": 16, "width": 32, "continuation": 5}
TINY = [f"--{name}={size}" for name, size in TINY_SIZES.items()]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
DEADLINE = 600.0  # the timeout of a hang
INTERRUPT_SECONDS = 3.0


def torchrun(ranks: int, *arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, SCRIPT, "--device=cpu", *arguments]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE, check=False
    )


@pytest.mark.parametrize(
    ("ranks", "split", "exact"),
    [
        pytest.param(2, "--stages 1,1 --dtype bfloat16", True, marks=pytest.mark.slow),
        pytest.param(2, "--stages 1,1 --compile", True, marks=pytest.mark.slow),
        (3, "--stages 1,1,1 --laps 2 --lanes paired --loss-reduction token", True),
        pytest.param(5, "--stages 1,2 --dp 2 --edge-dp 1", False, marks=pytest.mark.slow),
    ],
)
def test_training_equals_one_process(ranks: int, split: str, exact: bool, tmp_path: Path) -> None:
    output = tmp_path / "made" / "here"
    done = run(
        torchrun(ranks, *split.split(), *TINY, "--check", "--prompt", "Hello", "--output", str(output))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for step in (1, 2, 3) if exact else (1,):
        verdict = "bit-equal" if exact else "equal but for rounding"
        assert (
            f"check of step {step}: losses and gradients are {verdict} to those of one process" in done.stdout
        )
    for text in (
        "loss: 5.5",
        "Hello|",
        "edge 0.0",
        "cloud 1.0",
        "F0:0.0->1.0",
        "planned",
        "measured",
    ):
        assert text in done.stdout
    assert "runs on the CPU: --device cpu\n" in done.stdout
    assert "tokens/s" in done.stderr
    assert "Traceback" not in done.stderr
    events = json.loads((output / "trace.json").read_text())["traceEvents"]
    assert {"0F0", "1B2"} <= {event["name"] for event in events}
    assert (output / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_job_of_one_rank_needs_no_launcher(tmp_path: Path) -> None:
    done = run(
        [sys.executable, SCRIPT, "--device=cpu", "--stages=1", *TINY, "--check", f"--output={tmp_path}"]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check of step 3: losses and gradients are bit-equal" in done.stdout


@pytest.mark.slow
def test_training_learns(tmp_path: Path) -> None:
    """100 steps of 256 bytes: from the uniform distribution's log(256) = 5.5 to about 3.0 (a fixed seed)."""
    sizes = "--steps 100 --microbatches 2 --batch 4 --sequence 32 --width 32 --continuation 1"
    done = run(torchrun(2, "--stages", "1,1", *sizes.split(), "--output", str(tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.search(
        r"loss: (\S+) in the first step, (\S+) in the last 20, (\S+) on text not seen", done.stdout
    )
    assert losses, done.stdout
    first, last, held_out = map(float, losses.groups())
    assert first > 5.4
    assert last < 3.3
    assert held_out < 3.3


@pytest.mark.slow
def test_wrong_number_of_processes_is_one_sentence() -> None:
    done = run(torchrun(2, "--stages", "1,1,1", *TINY))
    assert done.returncode != 0
    assert done.stderr.count("needs 3 ranks, but WORLD_SIZE is 2") == 2  # every rank prints it


@pytest.mark.slow
def test_missing_text_is_one_sentence_on_every_rank() -> None:
    done = run(torchrun(2, "--stages", "1,1", "--text", "/nowhere", *TINY))
    assert done.returncode != 0
    sentences = sorted(line for line in done.stderr.splitlines() if line.startswith(f"{SCRIPT}: "))
    assert sentences == [
        f"{SCRIPT}: [Errno 2] No such file or directory: '/nowhere'",
        f"{SCRIPT}: another rank cannot go on and says why",
    ]
    before, _, _ = done.stderr.partition("torch/distributed/elastic")  # before torchrun's own report
    assert "Traceback" not in before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--stages", "1", "--layers", "1"], "give at least --layers 2"),
        (["--stages", "1,1"], "torchrun --standalone --nproc-per-node 2"),
        (["--stages", "1", "--text", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: list[str], sentence: str) -> None:
    done = run([sys.executable, SCRIPT, "--device=cpu", *arguments])
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupt_ends_all_processes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = torchrun(3, "--steps", "100000", "--output", str(tmp_path))
    with log.open("wb") as file:
        job = subprocess.Popen(
            command, env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    workers: list[int] = []
    try:
        _wait_for(lambda: re.search(rb"step \d+, loss", log.read_bytes()) is not None, DEADLINE, log)
        workers = _children(job.pid)
        assert len(workers) == 3
        os.killpg(job.pid, signal.SIGINT)
        start = time.monotonic()
        _wait_for(lambda: job.poll() is not None and not any(map(_alive, workers)), DEADLINE, log)
        assert in_time(time.monotonic() - start, INTERRUPT_SECONDS)
        assert job.returncode != 0
        before, _, after = log.read_text().partition("\ninterrupted\n")
        assert "Traceback" not in before
        assert SCRIPT not in after  # the only traceback is torchrun's own
    finally:
        job.kill()
        for worker in filter(_alive, workers):
            os.kill(worker, signal.SIGKILL)


def _wait_for(condition: Callable[[], bool], seconds: float, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s:\n{log.read_text()}"
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    """Return False also for a process that has ended and was not waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
