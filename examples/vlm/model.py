"""A Qwen2.5-VL small enough for a CPU, and the assignment of its layers to stages."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2_5_VLConfig

from vlm.words import VOCABULARY

__all__ = ["MERGE", "PATCH", "layers_of_chunks", "small_config"]

PATCH = 4  # side in pixels
MERGE = 2  # side in patches of the area that becomes one token
VISION_DEPTH, TEXT_DEPTH = 3, 4
VISION_WIDTH, TEXT_WIDTH, HEADS = 32, 64, 4


def small_config() -> Qwen2_5_VLConfig:
    """Grey images of one frame; every other block of the vision tower looks at windows of 4 by 4 patches."""
    vision = {
        "depth": VISION_DEPTH,
        "hidden_size": VISION_WIDTH,
        "intermediate_size": 2 * VISION_WIDTH,
        "num_heads": HEADS,
        "out_hidden_size": TEXT_WIDTH,
        "in_channels": 1,
        "temporal_patch_size": 1,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "window_size": 4 * PATCH,
        "initializer_range": VISION_WIDTH**-0.5,
        "fullatt_block_indexes": list(range(1, VISION_DEPTH, 2)),
    }
    text = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": TEXT_DEPTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        "initializer_range": TEXT_WIDTH**-0.5,
        "pad_token_id": VOCABULARY.index("<padding>"),
        "bos_token_id": VOCABULARY.index("<start>"),
        "eos_token_id": None,
    }
    tokens: dict[str, Any] = {
        "image_token_id": VOCABULARY.index("<image>"),
        "video_token_id": VOCABULARY.index("<video>"),
        "vision_start_token_id": VOCABULARY.index("<images>"),
        "vision_end_token_id": VOCABULARY.index("</images>"),
    }
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)


def layers_of_chunks(stages: int) -> list[int]:
    """The number of layers of each chunk: one per stage for the vision tower, then those of the language model."""
    return [*_evenly(VISION_DEPTH, stages), *_evenly(TEXT_DEPTH, stages + 1)]


def _evenly(layers: int, chunks: int) -> list[int]:
    return [layers // chunks + (index < layers % chunks) for index in range(chunks)]
