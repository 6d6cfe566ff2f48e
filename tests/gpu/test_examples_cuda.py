"""The examples as users start them, on the GPUs of this machine, which three ranks share if it has fewer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = "--stages 1,1,1 --steps 4 --microbatches 3 --batch 1 --sequence 16 --width 32 --continuation 5 --check"


def run(name: str, *arguments: str) -> str:
    """Return what the example prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*launcher, str(EXAMPLES / name), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("options", ["--dtype float32", "--dtype bfloat16", "--compile"])
def test_text_on_gpus_equals_one_process_on_a_gpu(options: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    printed = run("train_text.py", *TINY.split(), *options.split(), "--output", str(tmp_path))
    assert printed.startswith("runs on GPUs, ")
    for step in (1, 2, 3):
        assert f"check of step {step}: losses and gradients are bit-equal to those of one process" in printed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vlm_goes_on_and_writes_a_model(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from transformers import Qwen2_5_VLForConditionalGeneration

    places = [f"--{name}={tmp_path / name}" for name in ("checkpoints", "output")]
    sizes = ["--steps=4", "--save-every=2", "--microbatches=4", "--batch=2", f"--dtype={dtype}"]
    assert "accuracy after training: " in run("train_vlm.py", *sizes, *places)
    shutil.rmtree(tmp_path / "checkpoints" / "step-4")
    assert "2 of 4 steps were done before\n" in run("train_vlm.py", *sizes, *places)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "output")
    assert all(parameter.isfinite().all() for parameter in model.parameters())
