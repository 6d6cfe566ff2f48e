"""Checks that a model can be split into chunks, before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from ldt.integrations.hf.call_order import prove_text, prove_vision
from ldt.integrations.hf.chunks import TextChunk, VisionChunk
from ldt.integrations.hf.lap_inputs import needed_outputs
from ldt.integrations.hf.meta_model import keep_text, keep_vision, materialize, meta_model, model_class
from ldt.integrations.hf.router_loss import check_router_loss, wants_router_loss, without_router_loss
from ldt.integrations.hf.stacks import Part, find_laps, keep

__all__ = ["count_layers", "count_stacks", "merges_in_place", "refuse_split"]

_MORE_OUTPUTS = {
    "output_hidden_states": "those of other chunks would be lost",
    "output_attentions": "they would be lost",
}


def count_layers(config: PreTrainedConfig, laps: int) -> tuple[int, int]:
    """Return the number of language layers and of blocks of the vision tower, 0 without one.

    Raises ValueError for a model whose parts are not where chunks expect them, or that computes anything outside them.
    Every chunk runs the forward of the whole model, so the forward must do nothing except run the parts: every chunk
    would repeat a scaling of embeddings, for example. So with all parts removed, the model must return its input, and
    the whole forward must run each part once, in order, on the result of the previous one; see ``call_order``.
    """
    _refuse_more_outputs(config)
    kind = model_class(config, laps)
    routed = laps == 1 and wants_router_loss(config)
    try:
        model = meta_model(without_router_loss(config) if routed else config, laps)
        if routed:
            check_router_loss(model)
        layers = keep_text(model, (), embedding=False, head=False)
        _refuse_changes(TextChunk(model), 0)
        if laps == 1:
            prove_text(model)
            return layers, 0
        blocks = keep_vision(model, (), embedding=False, merger=False)
        tower = VisionChunk(model)
        _refuse_changes(tower, config.vision_config.spatial_merge_size)
        prove_vision(model, lambda: _run_vision(tower, config.vision_config.spatial_merge_size))
        prove_text(model)
        return layers, blocks
    except Exception as error:  # a forward with missing parts can raise anything
        text = (
            str(error)
            if isinstance(error, (AttributeError, ValueError))
            else f"{type(error).__name__}: {error}"
        )
        raise ValueError(
            f"{kind.__name__} (model type {config.model_type!r}) cannot be run in chunks: {text}. Models that are "
            "built and run like Llama, Qwen2 and Qwen3 can be split, with two laps those like Qwen2.5-VL"
        ) from error


def merges_in_place(config: PreTrainedConfig) -> bool:
    """Whether the model is like Qwen2.5-VL: a vision tower with a merger in its end, and nothing else from inside."""
    tower: Any = getattr(getattr(meta_model(config, 2), "model", None), "visual", None)
    return hasattr(tower, "merger") and not hasattr(tower, "deepstack_merger_list")


def count_stacks(config: PreTrainedConfig, laps: int) -> tuple[int, int]:
    """Return the number of layers of the decoder and of the encoder of another model in two laps.

    Raises ValueError if it has not two stacks of layers, or leaves out layers at random.
    """
    _refuse_more_outputs(config)
    kind = model_class(config, laps)
    if wants_router_loss(config):
        raise ValueError(
            f"{type(config).__name__} has output_router_logits=True, but chunks of two laps do not compute the "
            "auxiliary loss of the routers: set it to False"
        )
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0):
            raise ValueError(f"{type(config).__name__} has {name}={getattr(config, name)}: set it to 0")
    try:
        model = meta_model(config, laps)
        found = find_laps(model)
        needed_outputs(model, found.encoder)
        keep(model, found, Part(range(0), begins=True))
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"{kind.__name__} (model type {config.model_type!r}) cannot be run in chunks: {error}"
        ) from error
    return len(found.decoder.list_of(model)), len(found.encoder.list_of(model))


def refuse_split(config: PreTrainedConfig, encoder: Sequence[range], decoder: Sequence[range]) -> None:
    """Raise ValueError if the layers of ``count_stacks`` cannot be divided so."""
    model = meta_model(config, 2)
    found = find_laps(model)
    if (found.of_encoder.carried and not encoder[0]) or (found.of_decoder.carried and not decoder[0]):
        raise ValueError(
            "the first layers of the encoder and of the decoder compute biases of positions for all others, so they "
            f"must be on the edge: chunks 0 and {len(encoder)} must have layers"
        )
    root: Any = model.get_submodule(found.encoder.root)
    added = len(getattr(root, "deepstack_visual_indexes", ()))
    if decoder[-1].start < added:
        raise ValueError(
            f"features of images are added behind the first {added} language layers, which must be before the last "
            f"chunk; it begins with layer {decoder[-1].start}"
        )


def _refuse_changes(chunk: TextChunk | VisionChunk, merge_size: int) -> None:
    materialize(chunk.model, torch.device("cpu"), {})
    with torch.no_grad():
        if isinstance(chunk, TextChunk):
            given = _numbers(1, 2, chunk.config.get_text_config().hidden_size)
            got = chunk(given)
        else:
            given, got = _run_vision(chunk, merge_size)
    if not torch.equal(given, got):
        raise ValueError("it changes hidden states outside of its layers")


def _run_vision(chunk: VisionChunk, merge_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    side = 2 * merge_size
    given = _numbers(side * side, chunk.config.vision_config.hidden_size)
    return given, chunk(given, given[:0], image_grid_thw=torch.tensor([[1, side, side]]))[0]


def _refuse_more_outputs(config: PreTrainedConfig) -> None:
    """Raise ValueError for a config with more outputs: chunks pass only hidden states to each other."""
    if not config.return_dict:
        name = type(config).__name__
        raise ValueError(f"{name} has return_dict=False, which transformers cannot run: set it to True")
    for part in (config, config.get_text_config(), getattr(config, "vision_config", None)):
        for flag, what in _MORE_OUTPUTS.items():
            if getattr(part, flag, False):
                raise ValueError(
                    f"{type(config).__name__} has {flag}=True, but chunks return only hidden states and logits, so "
                    f"{what}: set it to False"
                )


def _numbers(*shape: int) -> torch.Tensor:
    """Distinct numbers, without a random generator."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
