"""Computes inputs of a microbatch that other stages cannot compute without tokens. For the edge's data pipeline."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ldt.integrations.hf.meta_model import model_class

__all__ = ["packed_position_ids", "position_ids"]


def position_ids(
    config: PreTrainedConfig,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    image_grid_thw: torch.Tensor | None = None,
    video_grid_thw: torch.Tensor | None = None,
    second_per_grid_ts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the positions that a vision-language model would compute itself, [3, batch, sequence].

    Add them to a microbatch's inputs as ``position_ids``. ``input_ids`` and ``attention_mask`` are [batch, sequence],
    grids [images, 3]; ``second_per_grid_ts`` has the seconds of video per temporal step, [videos].
    """
    batch, sequence = input_ids.shape
    if not any(grid is not None and len(grid) for grid in (image_grid_thw, video_grid_thw)):
        return torch.arange(sequence, device=input_ids.device).expand(3, batch, sequence)
    arguments = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "image_grid_thw": image_grid_thw,
        "video_grid_thw": video_grid_thw,
        "second_per_grid_ts": second_per_grid_ts,
        "mm_token_type_ids": (input_ids == config.image_token_id) + 2 * (input_ids == config.video_token_id),
    }
    model = _without_parts(config)
    accepted = inspect.signature(model.get_rope_index).parameters
    positions: torch.Tensor = model.get_rope_index(**{k: v for k, v in arguments.items() if k in accepted})[0]
    return positions


def packed_position_ids(segments: torch.Tensor) -> torch.Tensor:
    """Return positions [batch, sequence] that restart at 0 wherever the segment number changes.

    Such positions, *without* an attention mask, tell transformers that a row packs several texts that do not attend to
    each other. With a mask it treats the row as one text, so make padding a segment of its own.
    """
    steps = torch.arange(segments.shape[-1], device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[..., 1:] = segments[..., 1:] != segments[..., :-1]
    return steps - torch.where(begins, steps, 0).cummax(dim=-1).values


def _without_parts(config: PreTrainedConfig) -> Any:
    """The inner model without parts, for a method that needs only its config."""
    with torch.device("meta"):
        inner: Any = type(model_class(config, laps=2)._from_config(config).model)
    model = inner.__new__(inner)
    nn.Module.__init__(model)
    model.config = config
    return model
