"""A pipeline of Hugging Face chunks on GPUs equals the unsplit model in losses and gradients, with one or two laps.

Three ranks. On fewer GPUs they share them: see sharing.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sharing import my_device

from ldt.testing import RankPool

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "integrations"))
from test_hf_pipeline import Case, images, padded_and_packed, ragged, step_as_unsplit

WORLD_SIZE = 3
BACKEND = "nccl"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def step(config: Any, layers: Sequence[int], laps: int, microbatches: Sequence[Any]) -> int:
    torch.backends.cudnn.allow_tf32 = False  # patches are embedded by a convolution
    return step_as_unsplit(config, layers, laps, microbatches, backend=BACKEND, device=my_device())


@pytest.mark.parametrize(
    ("case", "least"),
    [(ragged(True), 11), (ragged(False), 11), (padded_and_packed("llama"), 9), (images(), 11)],
    ids=["ragged, tied", "ragged, untied", "padded and packed", "images in two laps"],
)
def test_a_step_equals_the_unsplit_model(pool: RankPool, case: Case, least: int) -> None:
    assert all(number >= least for number in pool.run(step, *case, timeout=180))
