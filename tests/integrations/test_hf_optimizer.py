"""Parameter groups of chunks are those that the Trainer of transformers makes for the whole model."""

from __future__ import annotations

import pytest
import torch
from hf_models import text_config, unsplit, vision_config
from transformers import PreTrainedConfig, Trainer

from ldt.integrations import hf

CASES: dict[str, tuple[PreTrainedConfig, list[int], int]] = {
    "llama": (text_config("llama"), [1, 2, 1, 1], 1),
    "tied": (text_config("qwen3", head_dim=8, tie_word_embeddings=True), [1, 2, 1, 1], 1),
    "biases": (text_config("qwen2", tie_word_embeddings=False), [0, 3, 2, 0], 1),
    "images": (vision_config(), [1, 2, 1, 1, 2, 1, 1], 2),
}


@pytest.mark.parametrize("name", CASES)
def test_groups_are_those_of_the_trainer(name: str) -> None:
    config, layers, laps = CASES[name]
    parts = hf.split(config, layers, laps=laps)
    chunks = parts.build(range(parts.num_chunks))
    hf.init_weights(chunks, seed=0)
    model = unsplit(config, chunks, laps, "sdpa")
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    with_decay, without = hf.parameter_groups(chunks, 0.1)
    assert (with_decay["weight_decay"], without["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for chunk in reversed(chunks) for name, p in chunk.model.named_parameters()}
    for group, expected in ((with_decay, True), (without, False)):
        found = sorted(names[id(parameter)] for parameter in group["params"])
        assert found == sorted(name for name, _ in model.named_parameters() if (name in decayed) is expected)


def test_frozen_parameters_are_left_out_and_empty_groups_stay() -> None:
    (chunk,) = hf.split(text_config("llama"), [1, 2, 1, 1]).build([1])
    chunk.requires_grad_(False)
    groups = hf.parameter_groups([chunk], 0.1)
    assert [group["params"] for group in groups] == [[], []]
    torch.optim.AdamW(groups)
