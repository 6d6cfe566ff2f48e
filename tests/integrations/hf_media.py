"""Small models of vision, sound and text with an encoder, and microbatches for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hf_images import BATCHES, SMALL, WIDE, batch, sample, with_positions
from hf_models import IMAGE, SIZES, VIDEO, VOCABULARY, Inputs, tokens
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ldt.integrations import hf
from ldt.integrations.hf.meta_model import model_class

TEXT = {**SIZES, "head_dim": 8}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
METADATA = {"attention_mask", "position_ids", "token_type_ids", "decoder_attention_mask"}


@dataclass
class Family:
    """A small model and its microbatches; ``layers`` is how it is split."""

    config: PreTrainedConfig
    microbatches: list[Inputs]
    layers: list[int] = field(default_factory=lambda: [1, 2, 1, 1, 2, 1, 1])


def pixels(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(*lines: Sequence[int], side: str = "right") -> Inputs:
    """Rows of tokens: a number n > 0 is n tokens of text, -n are n tokens of an image."""
    texts = []
    for number, line in enumerate(lines):
        row: list[int] = []
        for part in line:
            row += [IMAGE] * -part if part < 0 else tokens(part, seed=number + len(row)).tolist()
        texts.append(row)
    longest = max(map(len, texts))
    pads = [[0] * (longest - len(row)) for row in texts]
    ones = [[1] * len(row) for row in texts]
    join = (lambda one, pad: one + pad) if side == "right" else (lambda one, pad: pad + one)
    return {
        "input_ids": torch.tensor(list(map(join, texts, pads))),
        "attention_mask": torch.tensor(list(map(join, ones, pads))),
    }


def with_images(per_image: int, shape: Callable[[int], tuple[int, ...]]) -> list[Inputs]:
    """An image, several in a sample beside a sample without, and none."""
    image = -per_image
    return [
        rows([3, image, 2]) | {"pixel_values": pixels(*shape(1))},
        rows([2, image, 1, image, 3], [6], [1, image, 2], side="left")
        | {"pixel_values": pixels(*shape(3), seed=1)},
        rows([7], [4]),
    ]


def llava(**changes: Any) -> Family:
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **SIZES},
        vision_config={"model_type": "clip_vision_model", **TOWER},
        image_token_id=IMAGE,
        **changes,
    )
    return Family(config, with_images(16, lambda n: (n, 3, 16, 16)), [1, 2, 1, 1, 2, 1, 1])


def of_vision(kind: str, language: str, tower: str, **changes: Any) -> PreTrainedConfig:
    """A config of a vision-language model: of a kind of text and of a kind of tower."""
    options = {"image_token_id": IMAGE, "image_token_index": IMAGE, **changes}
    return AutoConfig.for_model(
        kind,
        text_config={"model_type": language, **TEXT, **options.pop("text", {})},
        vision_config={"model_type": tower, **TOWER, **options.pop("vision", {})},
        **options,
    )


def with_types(microbatches: list[Inputs]) -> list[Inputs]:
    """Add the types of tokens: 1 for those of images."""
    return [m | {"token_type_ids": (m["input_ids"] == IMAGE).long()} for m in microbatches]


def gemma3(**changes: Any) -> Family:
    text = {"sliding_window": 4}
    config = of_vision(
        "gemma3", "gemma3_text", "siglip_vision_model", mm_tokens_per_image=4, text=text, **changes
    )
    return Family(config, with_types(with_images(4, lambda n: (n, 3, 16, 16))))


def internvl(**changes: Any) -> Family:
    config = of_vision(
        "internvl",
        "qwen2",
        "internvl_vision",
        vision={"image_size": (16, 16), "patch_size": (4, 4)},
        **changes,
    )
    return Family(config, with_images(4, lambda n: (n, 3, 16, 16)))


def idefics3(kind: str = "idefics3", **changes: Any) -> Family:
    """Samples have several images, which are padded by images of zeros, and images have padding."""
    tower = {"idefics3": "idefics3_vision", "smolvlm": "smolvlm_vision"}[kind]
    config = of_vision(kind, "llama", tower, scale_factor=2, **changes)
    first = pixels(1, 1, 3, 16, 16)
    second = pixels(3, 2, 3, 16, 16, seed=1)
    second[1] = 0
    second[2, 1] = 0
    mask = torch.ones(3, 2, 16, 16, dtype=torch.long)
    mask[0, 0, :, 9:] = 0
    return Family(
        config,
        [
            rows([3, -4, 2]) | {"pixel_values": first},
            rows([2, -4, 1, -4, 3], [6], [1, -4, 2], side="left")
            | {"pixel_values": second, "pixel_attention_mask": mask},
            rows([7], [4]),
        ],
    )


def smolvlm(**changes: Any) -> Family:
    return idefics3("smolvlm", **changes)


def mistral3(**changes: Any) -> Family:
    """Images of several sizes."""
    config = of_vision("mistral3", "mistral", "pixtral", vision={"image_size": 32, "head_dim": 8}, **changes)
    sizes = torch.tensor([[16, 16], [24, 32], [32, 8]])
    return Family(
        config,
        [
            rows([3, -4, 2]) | {"pixel_values": pixels(1, 3, 16, 16), "image_sizes": sizes[:1]},
            rows([2, -4, 1, -12, 3], [6], [1, -4, 2], side="left")
            | {"pixel_values": pixels(3, 3, 32, 32, seed=1), "image_sizes": sizes},
            rows([7], [4]),
        ],
    )


def paligemma(**changes: Any) -> Family:
    config = of_vision("paligemma", "gemma", "siglip_vision_model", projection_dim=32, **changes)
    return Family(config, with_types(with_images(16, lambda n: (n, 3, 16, 16))))


def llava_next(**changes: Any) -> Family:
    """Images in a base view and in tiles; a row of an image ends with a vector for a new line."""
    config = of_vision(
        "llava_next",
        "llama",
        "clip_vision_model",
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
        **changes,
    )
    return Family(
        config,
        [
            rows([3, -(16 + 4 * 9), 2])
            | {"pixel_values": pixels(1, 3, 3, 16, 16), "image_sizes": torch.tensor([[16, 32]])},
            rows([7], [4]),
        ],
    )


def qwen3_vl(**changes: Any) -> Family:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config={"model_type": "qwen3_vl_text", **TEXT, "rope_parameters": rope},
        vision_config={
            "model_type": "qwen3_vl_vision",
            "depth": 4,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 2],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **changes,
    )
    images = [inputs for name, inputs in BATCHES.items() if "video" not in name]
    frames = batch(sample(3, (VIDEO, SMALL), (VIDEO, SMALL), (IMAGE, WIDE)), sample(2, (IMAGE, SMALL)))
    frames["video_grid_thw"] = torch.tensor([[2, 4, 4]])
    return Family(config, [with_positions(config, inputs) for inputs in [*images, frames]])


def t5(**changes: Any) -> Family:
    config = AutoConfig.for_model(
        "t5",
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_heads=4,
        num_layers=4,
        num_decoder_layers=5,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        **{"pad_token_id": 0, "decoder_start_token_id": 0, **changes},
    )
    source, target = rows([9], [5], [2]), rows([6], [3], [7])
    padded_target = {"decoder_" + name: value for name, value in target.items()}
    return Family(
        config,
        [
            {"input_ids": tokens(2, 7), "decoder_input_ids": tokens(2, 5)},
            source | padded_target,
            source | {"decoder_input_ids": tokens(3, 4)},
        ],
    )


def whisper(**changes: Any) -> Family:
    config = AutoConfig.for_model(
        "whisper",
        d_model=32,
        encoder_layers=4,
        decoder_layers=5,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=20,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **changes,
    )
    target = rows([6], [3], [7])
    return Family(
        config,
        [
            {"input_features": pixels(2, 8, 20), "decoder_input_ids": tokens(2, 5)},
            {"input_features": pixels(3, 8, 20)}
            | {"decoder_" + name: value for name, value in target.items()},
        ],
    )


AUDIO = {"num_mel_bins": 8, "max_source_positions": 8}


def qwen2_audio(**changes: Any) -> Family:
    """Sounds of two lengths, beside a sample without one."""
    config = AutoConfig.for_model(
        "qwen2_audio",
        text_config={"model_type": "qwen2", **SIZES},
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "d_model": 16,
            "encoder_layers": 4,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            **AUDIO,
        },
        audio_token_index=IMAGE,
        **changes,
    )
    mask = (torch.arange(16) < torch.tensor([[16], [9]])).long()
    return Family(
        config,
        [
            rows([2, -4, 3], [6], [1, -2, 2], side="left")
            | {"input_features": pixels(2, 8, 16), "feature_attention_mask": mask},
            rows([7], [4]),
        ],
    )


def voxtral(**changes: Any) -> Family:
    config = AutoConfig.for_model(
        "voxtral",
        text_config={"model_type": "llama", **SIZES},
        audio_config={
            "model_type": "voxtral_encoder",
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            **AUDIO,
        },
        audio_token_id=IMAGE,
        **changes,
    )
    return Family(
        config,
        [
            rows([2, -2, 3], [6], [1, -2, 2], side="left") | {"input_features": pixels(2, 8, 16)},
            rows([7], [4]),
        ],
    )


def whole_model(config: PreTrainedConfig, attention: str | None = None) -> PreTrainedModel:
    """The unsplit model in train mode, every weight of which is random."""
    torch.manual_seed(0)
    model: Any = model_class(config, 2)._from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
    return model.train()


def copy_weights(chunks: Sequence[hf.Chunk], model: nn.Module) -> None:
    stored = model.state_dict()
    for chunk in chunks:
        chunk.model.load_state_dict({name: stored[name] for name in chunk.model.state_dict()})
        computed = dict(model.named_buffers())
        for name, buffer in chunk.model.named_buffers():
            assert name not in computed or torch.equal(buffer, computed[name]), name


def inputs_of(chunk: nn.Module, on_edge: bool, inputs: Inputs) -> Inputs:
    """What the runtime gives ``chunk`` of ``inputs``: on the cloud metadata only."""
    declared = inspect.signature(chunk.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in declared.values())
    assert on_edge or not takes_any
    allowed = set(inputs) if on_edge else METADATA
    return {name: v for name, v in inputs.items() if name in allowed and (takes_any or name in declared)}


def walk(chunks: Sequence[nn.Module], edge: set[int], inputs: Inputs) -> torch.Tensor:
    """Run ``chunks`` in order."""
    hop: tuple[torch.Tensor, ...] = ()
    for index, chunk in enumerate(chunks):
        output = chunk(*hop, **inputs_of(chunk, index in edge, inputs))
        hop = output if isinstance(output, tuple) else (output,)
    return hop[0]


def specs_by_values(head: Any, inputs: Inputs) -> Any:
    return head.head_spec(**inputs)


FAMILIES = [
    "llava",
    "llava_next",
    "qwen3_vl",
    "gemma3",
    "internvl",
    "idefics3",
    "smolvlm",
    "mistral3",
    "paligemma",
    "t5",
    "whisper",
    "qwen2_audio",
    "voxtral",
]
