"""Small Hugging Face models, their microbatches, and a run of their chunks as in the runtime."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ldt.integrations import hf
from ldt.integrations.hf.meta_model import model_class

VOCABULARY = 101
IMAGE, VIDEO = 90, 91
METADATA = {"attention_mask", "position_ids", "cu_seqlens", "image_grid_thw", "video_grid_thw"}

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Inputs = dict[str, torch.Tensor]


def text_config(family: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **{**SIZES, **changes})


def vision_config(family: str = "qwen2_5_vl", **changes: Any) -> PreTrainedConfig:
    vision = {"depth": 4, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
    if family == "qwen2_5_vl":
        vision |= {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1, 3]}
    else:
        vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    return AutoConfig.for_model(
        family,
        text_config={**SIZES, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **changes,
    )


def unsplit(
    config: PreTrainedConfig, chunks: Sequence[hf.Chunk], laps: int, attention: str
) -> PreTrainedModel:
    """Build the whole model with transformers, with the weights of ``chunks``."""
    model: PreTrainedModel = model_class(config, laps)._from_config(config, attn_implementation=attention)
    model.load_state_dict(hf.state_dict(chunks))
    return model


def walk(chunks: Sequence[nn.Module], edge: set[int], inputs: Inputs) -> torch.Tensor:
    """Run ``chunks`` in order. Only those in ``edge`` get inputs that are not metadata."""
    hop: tuple[torch.Tensor, ...] = ()
    for index, chunk in enumerate(chunks):
        declared = inspect.signature(chunk.forward).parameters
        allowed = set(inputs) if index in edge else METADATA
        assert index in edge or set(declared) <= METADATA | {"hidden", "images", "videos"}
        given = {name: inputs[name] for name in declared if name in inputs and name in allowed}
        output = chunk(*hop, **given)
        hop = output if isinstance(output, tuple) else (output,)
    return hop[0]


def gradients(chunks: Sequence[hf.Chunk]) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for chunk in chunks for name, p in chunk.model.named_parameters()}


def refuse_other_gradients(model: nn.Module, chunks: Sequence[hf.Chunk]) -> None:
    found = gradients(chunks)
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert expected.keys() == found.keys() - {"lm_head.weight"} | expected.keys()
    for name, grad in expected.items():
        got = found[name]
        assert (grad is None) == (got is None), f"{name}: {grad} and {got}"
        assert grad is None or (got is not None and torch.equal(grad, got)), name


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, IMAGE, shape, generator=torch.Generator().manual_seed(seed))


def padded(lengths: Sequence[int], side: str) -> Inputs:
    """Return rows of these lengths, padded on the right or the left."""
    longest = max(lengths)
    steps = torch.arange(longest).expand(len(lengths), longest)
    count = torch.tensor(lengths)[:, None]
    mask = (steps < count) if side == "right" else (steps >= longest - count)
    return {"input_ids": tokens(len(lengths), longest) * mask, "attention_mask": mask.long()}


def packed(*rows: Sequence[int]) -> Inputs:
    """Return rows of consecutive texts of these lengths."""
    segments = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    return {"input_ids": tokens(*segments.shape), "position_ids": hf.packed_position_ids(segments)}


def labels_of(inputs: Inputs) -> torch.Tensor:
    labels = inputs["input_ids"].clone()
    ignored = (labels == IMAGE) | (labels == VIDEO)
    if "attention_mask" in inputs:
        ignored |= inputs["attention_mask"] == 0
    return labels.masked_fill(ignored, -100)
