"""Chunks of a vision-language model in two laps, run in order, equal the unsplit model bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest
import torch
from hf_images import BATCHES, PATCH, logits_of, with_positions
from hf_models import (
    Inputs,
    gradients,
    labels_of,
    refuse_other_gradients,
    unsplit,
    vision_config,
    walk,
)
from transformers import PreTrainedConfig

from ldt.integrations import hf
from ldt.runtime.common.tensor_spec import specs_of
from ldt.runtime.dry_run.shape_inference import infer_specs

LAYERS = [1, 2, 1, 1, 2, 1, 1]
EDGE = {0, 3, 6}


def check(config: PreTrainedConfig, attention: str, microbatches: Sequence[Inputs]) -> list[hf.Chunk]:
    chunks = hf.split(config, LAYERS, laps=2).build(range(7), attn_implementation=attention)
    hf.init_weights(chunks, seed=1)
    model = unsplit(config, chunks, 2, attention)
    for inputs in microbatches:
        logits = walk(chunks, EDGE, with_positions(config, inputs))
        expected = logits_of(model, inputs)
        assert torch.equal(logits, expected)
        for some in (logits, expected):
            model.loss_function(some, labels_of(inputs), config.get_text_config().vocab_size).backward()
    refuse_other_gradients(model, chunks)
    return chunks


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", BATCHES)
def test_two_laps_equal_the_unsplit_model(name: str, tied: bool, attention: str) -> None:
    check(vision_config(tie_word_embeddings=tied), attention, [BATCHES[name]])


def test_mixed_microbatches_accumulate_as_in_the_unsplit_model() -> None:
    check(vision_config(), "sdpa", list(BATCHES.values()))


def test_qwen2_vl_comes_for_free() -> None:
    check(vision_config("qwen2_vl"), "sdpa", list(BATCHES.values()))


def test_without_images_the_tower_gets_no_gradient() -> None:
    chunks = check(vision_config(), "sdpa", [BATCHES["none"]])
    assert all(grad is None for name, grad in gradients(chunks).items() if ".visual." in name)


def test_an_empty_batch_of_images_is_none() -> None:
    config = vision_config()
    chunks = hf.split(config, LAYERS, laps=2).build(range(7))
    hf.init_weights(chunks, seed=1)
    inputs = with_positions(config, BATCHES["none"])
    empty = {"pixel_values": torch.empty(0, PATCH), "image_grid_thw": torch.empty(0, 3, dtype=torch.long)}
    assert torch.equal(walk(chunks, EDGE, inputs | empty), walk(chunks, EDGE, inputs))


@pytest.mark.parametrize("setting", ["plain", "autocast", "bfloat16", "frozen tower"])
@pytest.mark.parametrize("name", BATCHES)
def test_declared_shapes_are_those_that_come(name: str, setting: str) -> None:
    config = vision_config()
    dtype = torch.bfloat16 if setting == "bfloat16" else None
    chunks = hf.split(config, LAYERS, laps=2).build(range(7), dtype=dtype)
    hf.init_weights(chunks, seed=1)
    for chunk in chunks[:3] if setting == "frozen tower" else []:
        chunk.requires_grad_(False)
    with torch.autocast("cpu", enabled=setting == "autocast"):
        refuse_wrong_specs(chunks, with_positions(config, BATCHES[name]))


def refuse_wrong_specs(chunks: Sequence[hf.Chunk], inputs: Inputs) -> None:
    hop: tuple[torch.Tensor, ...] = ()
    for index, chunk in enumerate(chunks):
        declared = inspect.signature(chunk.forward).parameters
        given = {name: inputs[name] for name in declared if name in inputs}
        expected = infer_specs(index, chunk, specs_of(hop), given, torch.device("cpu"), training=True)
        output = chunk(*hop, **given)
        hop = output if isinstance(output, tuple) else (output,)
        assert expected == specs_of(hop), f"chunk {index}"


def test_a_patch_without_a_grid_is_refused() -> None:
    config = vision_config()
    chunks = hf.split(config, LAYERS, laps=2).build([0, 3])
    with pytest.raises(ValueError, match="16 patches need their image_grid_thw, got None"):
        chunks[0](pixel_values=torch.randn(16, PATCH))


def test_images_without_positions_are_refused() -> None:
    config = vision_config()
    chunks = hf.split(config, LAYERS, laps=2).build(range(7))
    with pytest.raises(ValueError, match=r"needs position_ids among its inputs.*hf\.position_ids"):
        walk(chunks, EDGE, BATCHES["one image"])


def test_positions_are_those_that_the_model_computes() -> None:
    config = vision_config()
    for inputs in BATCHES.values():
        positions = with_positions(config, inputs)["position_ids"]
        assert positions.shape == (3, *inputs["input_ids"].shape)
        assert positions.dtype == torch.int64
