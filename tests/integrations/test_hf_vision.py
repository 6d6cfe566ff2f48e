"""Chunks of a vision-language model in two laps, run in order, are the unsplit model bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hf_models import (
    IMAGE,
    VIDEO,
    Inputs,
    gradients,
    labels_of,
    refuse_other_gradients,
    tokens,
    unsplit,
    vision_config,
    walk,
)
from transformers import PreTrainedConfig

from ldt.integrations import hf
from ldt.runtime.inference import infer_specs
from ldt.runtime.specs import specs_of

LAYERS = [1, 2, 1, 1, 2, 1, 1]
EDGE = {0, 3, 6}
PATCH = 3 * 2 * 4 * 4  # channels * temporal patch * patch side ** 2
Grid = tuple[int, int, int]


def sample(text: int, *media: tuple[int, Grid], after: int = 2) -> tuple[list[int], list[tuple[int, Grid]]]:
    """Text, then each image or video with some text behind it. A token stands for four patches."""
    row = tokens(text).tolist()
    for token, (time, height, width) in media:
        row += [token] * (time * height * width // 4) + tokens(after, seed=len(row)).tolist()
    return row, list(media)


def batch(*samples: tuple[list[int], list[tuple[int, Grid]]], side: str = "right") -> Inputs:
    longest = max(len(row) for row, _ in samples)
    rows, mask = [], []
    for row, _ in samples:
        padding = [0] * (longest - len(row))
        rows.append(row + padding if side == "right" else padding + row)
        ones = [1] * len(row)
        mask.append(ones + padding if side == "right" else padding + ones)
    inputs = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}
    names = {IMAGE: ("pixel_values", "image_grid_thw"), VIDEO: ("pixel_values_videos", "video_grid_thw")}
    for kind, (pixels, grid) in names.items():
        grids = torch.tensor([g for _, media in samples for token, g in media if token == kind])
        if len(grids):
            count = int(grids.prod(-1).sum())
            inputs[pixels] = torch.randn(count, PATCH, generator=torch.Generator().manual_seed(count))
            inputs[grid] = grids
    return inputs


SMALL, WIDE, TALL = (1, 4, 4), (1, 4, 10), (1, 14, 6)
BATCHES = {
    "one image": batch(sample(3, (IMAGE, SMALL))),
    "sizes": batch(
        sample(3, (IMAGE, SMALL)), sample(2, (IMAGE, WIDE)), sample(5, (IMAGE, TALL)), side="left"
    ),
    "several in a sample": batch(sample(3, (IMAGE, SMALL), (IMAGE, WIDE), (IMAGE, SMALL)), sample(4)),
    "none": batch(sample(6), sample(4)),
    "none, left padding": batch(sample(6), sample(4), side="left"),
    "video": batch(sample(3, (VIDEO, (2, 4, 4))), sample(2)),
    "image and video": batch(sample(2, (VIDEO, (3, 4, 8)), (IMAGE, TALL)), sample(2, (IMAGE, WIDE))),
}


def with_positions(config: PreTrainedConfig, inputs: Inputs) -> Inputs:
    given = {name: tensor for name, tensor in inputs.items() if not name.startswith("pixel")}
    return inputs | {"position_ids": hf.position_ids(config, **given)}


def of_unsplit(model: Any, inputs: Inputs) -> torch.Tensor:
    """As a processor of transformers would have it: with the kinds of tokens, without positions."""
    ids = inputs["input_ids"]
    logits: torch.Tensor = model(
        **inputs, mm_token_type_ids=((ids == IMAGE) + 2 * (ids == VIDEO)).int(), use_cache=False
    ).logits
    return logits


def check(config: PreTrainedConfig, attention: str, microbatches: Sequence[Inputs]) -> list[hf.Chunk]:
    chunks = hf.split(config, LAYERS, laps=2).build(range(7), attn_implementation=attention)
    hf.init_weights(chunks, seed=1)
    model = unsplit(config, chunks, 2, attention)
    for inputs in microbatches:
        logits = walk(chunks, EDGE, with_positions(config, inputs))
        expected = of_unsplit(model, inputs)
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
    with pytest.raises(ValueError, match="16 patches need the image_grid_thw that they are of, got None"):
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
