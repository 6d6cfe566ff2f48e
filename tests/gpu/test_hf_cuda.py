"""A pipeline of Hugging Face chunks on GPUs: losses and gradients of the unsplit model, in one lap and in two.

Three ranks. On two GPUs they share them: see sharing.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sharing import GPUS, my_device

from ldt.testing import RankPool

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "integrations"))
from hf_images import BATCHES, with_positions
from hf_models import Inputs, packed, padded, text_config, tokens, vision_config
from test_hf_pipeline import step_as_unsplit

WORLD_SIZE = 3
BACKEND = "nccl"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]


def step(config: Any, layers: Sequence[int], laps: int, microbatches: Sequence[Inputs]) -> int:
    torch.backends.cudnn.allow_tf32 = False  # patches are embedded by a convolution
    return step_as_unsplit(config, layers, laps, microbatches, backend=BACKEND, device=my_device())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_ragged_microbatches_without_padding(pool: RankPool, tied: bool) -> None:
    config = text_config("qwen3", head_dim=8, tie_word_embeddings=tied)
    microbatches = [{"input_ids": tokens(*size, seed=size[1])} for size in ((2, 7), (2, 3), (2, 11), (1, 2))]
    compared = pool.run(step, config, [1, 2, 1, 1], 1, microbatches, timeout=120)
    assert all(number > 10 for number in compared)


def test_padded_and_packed_microbatches(pool: RankPool) -> None:
    """Masks and positions are on the GPU of the edge, and come to the middle stage's as metadata."""
    config = text_config("llama", tie_word_embeddings=False)
    microbatches = [
        padded([5, 9, 2], "right"),
        padded([7, 3], "left"),
        packed([3, 5, 2], [4, 1, 5]),
        {"input_ids": tokens(2, 6)},
    ]
    compared = pool.run(step, config, [1, 2, 1, 1], 1, microbatches, timeout=120)
    assert all(number >= 9 for number in compared)


def test_images_of_all_sizes_and_none_in_two_laps(pool: RankPool) -> None:
    config = vision_config(tie_word_embeddings=False)
    microbatches = [with_positions(config, inputs) for inputs in BATCHES.values()]
    compared = pool.run(step, config, [1, 2, 1, 1, 2, 1, 1], 2, microbatches, timeout=180)
    assert all(number > 10 for number in compared)
