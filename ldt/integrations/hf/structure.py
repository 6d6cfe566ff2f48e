"""Tells models that can be run in parts from those that cannot, before any weight is read."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from ldt.integrations.hf.chunks import TextChunk, VisionChunk
from ldt.integrations.hf.skeleton import keep_text, keep_vision, materialize, skeleton

__all__ = ["count_layers"]


def count_layers(config: PreTrainedConfig, laps: int) -> tuple[int, int]:
    """The numbers of language layers and of blocks of the vision tower, 0 without one.

    Raises ValueError for a model whose parts are not where chunks look for them, or that does more than its parts.
    A chunk runs the forward of the whole model, and so do the others: nothing may happen there but what the parts
    do that chunks share out. A scaling of embeddings, for one, would be done by every chunk. With all parts taken
    out, therefore, what goes in must come out.
    """
    model = skeleton(config, laps)
    try:
        layers = keep_text(model, (), embedding=False, head=False)
        _refuse_changes(TextChunk(model), 0)
        if laps == 1:
            return layers, 0
        blocks = keep_vision(model, (), embedding=False, merger=False)
        _refuse_changes(VisionChunk(model), config.vision_config.spatial_merge_size)
        return layers, blocks
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{type(model).__name__} (model type {config.model_type!r}) cannot be run in chunks: {error}. A model can "
            "be split that is built and run as those of Llama, Qwen2 and Qwen3, with two laps as that of Qwen2.5-VL"
        ) from error


def _refuse_changes(chunk: TextChunk | VisionChunk, merge_size: int) -> None:
    materialize(chunk.model, torch.device("cpu"), {})
    with torch.no_grad():
        if isinstance(chunk, TextChunk):
            given = _numbers(1, 2, chunk.config.get_text_config().hidden_size)
            got = chunk(given)
        else:
            side = 2 * merge_size
            given = _numbers(side * side, chunk.config.vision_config.hidden_size)
            got, _ = chunk(given, given[:0], image_grid_thw=torch.tensor([[1, side, side]]))
    if not torch.equal(given, got):
        raise ValueError("it changes hidden states outside of its layers")


def _numbers(*shape: int) -> torch.Tensor:
    """Any that are all different, without a random generator."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
