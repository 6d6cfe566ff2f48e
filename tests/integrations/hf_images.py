"""Microbatches of text with images and videos for small vision-language models."""

from __future__ import annotations

from typing import Any

import torch
from hf_models import IMAGE, VIDEO, Inputs, tokens
from transformers import PreTrainedConfig

from ldt.integrations import hf

PATCH = 3 * 2 * 4 * 4  # channels * temporal patch * patch side ** 2
Grid = tuple[int, int, int]


def sample(text: int, *media: tuple[int, Grid], after: int = 2) -> tuple[list[int], list[tuple[int, Grid]]]:
    """Return text, then each image or video followed by some text. One token stands for four patches."""
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


def logits_of(model: Any, inputs: Inputs) -> torch.Tensor:
    """Call the model as a processor of transformers would: with token types, without positions."""
    ids = inputs["input_ids"]
    logits: torch.Tensor = model(
        **inputs, mm_token_type_ids=((ids == IMAGE) + 2 * (ids == VIDEO)).int(), use_cache=False
    ).logits
    return logits
