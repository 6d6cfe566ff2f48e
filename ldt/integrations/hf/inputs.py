"""What the data pipeline on the edge adds to a microbatch, since other stages cannot compute it without tokens."""

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
    """The positions that a vision-language model would compute of its own accord, [3, batch, sequence].

    They go into a microbatch's inputs as ``position_ids``. ``input_ids`` and ``attention_mask`` are [batch, sequence],
    grids [images, 3]; ``second_per_grid_ts`` has the seconds of video per step of time, [videos].
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
    """Positions [batch, sequence] that begin again at 0 wherever the number of the segment changes.

    Such positions, *without* an attention mask, are what tells transformers that a row has several texts which do
    not see each other: with a mask it takes the row for one text. So padding must be a segment of its own.
    """
    steps = torch.arange(segments.shape[-1], device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[..., 1:] = segments[..., 1:] != segments[..., :-1]
    return steps - torch.where(begins, steps, 0).cummax(dim=-1).values


def _without_parts(config: PreTrainedConfig) -> Any:
    """The inner model for the sake of a method that needs its config alone."""
    with torch.device("meta"):
        inner: Any = type(model_class(config, laps=2)._from_config(config).model)
    model = inner.__new__(inner)
    nn.Module.__init__(model)
    model.config = config
    return model
