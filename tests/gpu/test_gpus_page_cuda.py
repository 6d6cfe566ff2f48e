"""The program for two GPUs (docs/start/gpus.md), and doctor, which tries each kind of lane."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CONNECT = "ldt.connect(topology)"


def program() -> str:
    """The program of the page, over the transport named on its command line."""
    page = (Path(__file__).parents[2] / "docs" / "start" / "gpus.md").read_text(encoding="utf-8")
    match = re.search(r'```python title="train_gpu.py"\n(.*?)```', page, re.DOTALL)
    assert match is not None
    text = match.group(1)
    assert text.count(CONNECT) == 1
    return "import sys\n" + text.replace(CONNECT, "ldt.connect(topology, transport=sys.argv[1])")


@pytest.mark.parametrize("transport", ["copy_engine", "nccl", "c10d"])
def test_the_program_trains(tmp_path: Path, transport: str) -> None:
    job = tmp_path / "train.py"
    job.write_text(program())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(job), transport],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) > 5
    assert losses[-1] < 0.5 * losses[0]


def test_doctor_tries_each_kind_of_lane(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ldt", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("host lane", "c10d lane", "nccl lane", "copy engine lane"):
        assert re.search(rf"^{kind} +\d+ µs, [\d.e+]+ GB/s$", done.stdout, re.MULTILINE), (kind, done.stdout)
