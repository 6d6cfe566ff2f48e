"""Chunks of causal language models, run in order, equal the unsplit model bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import (
    Inputs,
    labels_of,
    packed,
    padded,
    refuse_other_gradients,
    text_config,
    tokens,
    unsplit,
    walk,
)
from transformers import PreTrainedConfig

from ldt.integrations import hf

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
}
# Not promised, but supported for free, as chunks run the model's own forward. Each has a peculiarity: windows,
# scaled or capped logits, other positions of norms, layers without rotation, a fused matrix for query, key and value.
OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "gemma2": {"head_dim": 8, "sliding_window": 4},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4},
    "olmo2": {},
    "phi3": {},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0, 1]},
    "cohere": {},
    "granite": {"logits_scaling": 4.0},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
}
BATCHES = {
    "no padding": {"input_ids": tokens(2, 9)},
    "left padding": padded([9, 4, 1], "left"),
    "right padding": padded([3, 9, 5], "right"),
    "packed": packed([4, 1, 4], [2, 7]),
    "one packed row": packed([3, 5, 2, 1]),
    "one token": {"input_ids": tokens(1, 1)},
}


def check(config: PreTrainedConfig, attention: str | None, microbatches: list[Inputs]) -> None:
    parts = hf.split(config, [1, 2, 1, 1])
    chunks = parts.build(range(4), attn_implementation=attention)
    hf.init_weights(chunks, seed=1)
    model = unsplit(config, chunks, 1, attention)
    for inputs in microbatches:
        logits = walk(chunks, {0, 3}, inputs)
        expected = model(**inputs, use_cache=False).logits
        assert torch.equal(logits, expected)
        loss, expected_loss = (
            model.loss_function(some, labels_of(inputs), config.vocab_size) for some in (logits, expected)
        )
        if inputs["input_ids"].shape[1] > 1:
            assert torch.equal(loss, expected_loss)
            loss.backward()
            expected_loss.backward()
    refuse_other_gradients(model, chunks)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_the_unsplit_model(family: str, tied: bool, attention: str) -> None:
    config = text_config(family, tie_word_embeddings=tied, **FAMILIES[family])
    for inputs in BATCHES.values():
        check(config, attention, [inputs])


def test_ragged_microbatches_accumulate_as_in_the_unsplit_model() -> None:
    check(text_config("qwen3", head_dim=8, tie_word_embeddings=True), "sdpa", list(BATCHES.values()))


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_come_for_free(family: str) -> None:
    check(text_config(family, **OTHERS[family]), None, [BATCHES["left padding"], BATCHES["packed"]])


def test_packed_texts_do_not_see_each_other() -> None:
    config = text_config("llama")
    chunks = hf.split(config, [2, 3]).build(range(2))
    hf.init_weights(chunks, seed=0)
    both = packed([4, 5])
    first = {name: tensor[:, :4] for name, tensor in both.items()}
    second = {name: tensor[:, 4:] for name, tensor in both.items()}
    apart = torch.cat([walk(chunks, {0, 1}, inputs) for inputs in (first, second)], dim=1)
    torch.testing.assert_close(walk(chunks, {0, 1}, both), apart)


def test_positions_may_be_one_row_for_all() -> None:
    chunks = hf.split(text_config("llama"), [2, 3]).build(range(2))
    hf.init_weights(chunks, seed=0)
    inputs = {"input_ids": tokens(2, 6)}
    positions = {"position_ids": torch.arange(6)}
    assert torch.equal(walk(chunks, {0, 1}, inputs), walk(chunks, {0, 1}, inputs | positions))


def test_packed_positions_begin_again_with_each_segment() -> None:
    segments = torch.tensor([[0, 1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1]])
    assert hf.packed_position_ids(segments).tolist() == [[0, 0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6]]


def test_token_loss_is_the_loss_of_transformers_as_sum_and_count() -> None:
    model = unsplit(
        text_config("llama"), (chunks := hf.split(text_config("llama"), [5, 0]).build([0, 1])), 1, "sdpa"
    )
    hf.init_weights(chunks, seed=0)
    inputs = padded([9, 4, 1], "left")
    logits, labels = walk(chunks, {0, 1}, inputs), labels_of(inputs)
    total, count = hf.token_loss(logits, labels)
    assert count == (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(total / count, model.loss_function(logits, labels, model.config.vocab_size))
