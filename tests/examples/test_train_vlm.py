"""The vision-language example as users start it under torchrun: it learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parents[2] / "examples" / "train_vlm.py")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "HF_HUB_OFFLINE": "1",
}


def test_three_stages_learn_to_name_digits() -> None:
    """60 steps: sums are correct, and digits better than by chance (a fixed seed)."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*launcher, SCRIPT, "--steps=60", "--device=cpu"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"accuracy (\w+) training: with images (\d+)%, without images (\d+)%", done.stdout)
    assert [when for when, *_ in found] == ["before", "after"]
    (images_before, sums_before), (images, sums) = ([int(share) for share in shares] for _, *shares in found)
    assert images_before < 20 < images
    assert sums_before < 30
    assert sums > 80
