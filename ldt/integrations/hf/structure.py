"""Tells models that can be run in parts from those that cannot, before any weight is read."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from ldt.integrations.hf.call_order import prove_text, prove_vision
from ldt.integrations.hf.chunks import TextChunk, VisionChunk
from ldt.integrations.hf.meta_model import keep_text, keep_vision, materialize, model_class, skeleton

__all__ = ["count_layers"]

_MORE_OUTPUTS = {
    "output_router_logits": "the auxiliary loss of the routers would not be part of the loss",
    "output_hidden_states": "nobody would get those of other chunks",
    "output_attentions": "nobody would get them",
}


def count_layers(config: PreTrainedConfig, laps: int) -> tuple[int, int]:
    """The numbers of language layers and of blocks of the vision tower, 0 without one.

    Raises ValueError for a model whose parts are not where chunks look for them, or that does more than its parts.
    A chunk runs the forward of the whole model, and so do the others: nothing may happen there but what the parts
    do that chunks share out. A scaling of embeddings, for one, would be done by every chunk. With all parts taken
    out, therefore, what goes in must come out. And the whole forward must run each part once, in order, with what the
    one before returned; see ``witness``.
    """
    _refuse_more_outputs(config)
    kind = model_class(config, laps)
    try:
        model = skeleton(config, laps)
        layers = keep_text(model, (), embedding=False, head=False)
        _refuse_changes(TextChunk(model), 0)
        if laps == 1:
            prove_text(model)
            return layers, 0
        blocks = keep_vision(model, (), embedding=False, merger=False)
        tower = VisionChunk(model)
        _refuse_changes(tower, config.vision_config.spatial_merge_size)
        prove_vision(model, lambda: _seen(tower, config.vision_config.spatial_merge_size))
        prove_text(model)
        return layers, blocks
    except Exception as error:  # what a forward raises whose parts are not there can be anything
        text = (
            str(error)
            if isinstance(error, (AttributeError, ValueError))
            else f"{type(error).__name__}: {error}"
        )
        raise ValueError(
            f"{kind.__name__} (model type {config.model_type!r}) cannot be run in chunks: {text}. A model can "
            "be split that is built and run as those of Llama, Qwen2 and Qwen3, with two laps as that of Qwen2.5-VL"
        ) from error


def _refuse_changes(chunk: TextChunk | VisionChunk, merge_size: int) -> None:
    materialize(chunk.model, torch.device("cpu"), {})
    with torch.no_grad():
        if isinstance(chunk, TextChunk):
            given = _numbers(1, 2, chunk.config.get_text_config().hidden_size)
            got = chunk(given)
        else:
            given, got = _seen(chunk, merge_size)
    if not torch.equal(given, got):
        raise ValueError("it changes hidden states outside of its layers")


def _seen(chunk: VisionChunk, merge_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    side = 2 * merge_size
    given = _numbers(side * side, chunk.config.vision_config.hidden_size)
    return given, chunk(given, given[:0], image_grid_thw=torch.tensor([[1, side, side]]))[0]


def _refuse_more_outputs(config: PreTrainedConfig) -> None:
    """Chunks give hidden states to each other and nothing else, so what would be made of more is not there."""
    if not config.return_dict:
        name = type(config).__name__
        raise ValueError(
            f"{name} has return_dict=False, with which transformers cannot run it: set it to True"
        )
    for part in (config, config.get_text_config(), getattr(config, "vision_config", None)):
        for flag, what in _MORE_OUTPUTS.items():
            if getattr(part, flag, False):
                raise ValueError(
                    f"{type(config).__name__} has {flag}=True, but chunks return hidden states and logits alone, so "
                    f"{what}: set it to False"
                )


def _numbers(*shape: int) -> torch.Tensor:
    """Any that are all different, without a random generator."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
