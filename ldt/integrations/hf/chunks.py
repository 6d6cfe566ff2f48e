"""The kinds of chunks: their inputs, their outputs and the output shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ldt.integrations.hf.meta_model import decoder_of, layers_of
from ldt.runtime.common.tensor_spec import TensorSpec

__all__ = [
    "Chunk",
    "MergingChunk",
    "Sized",
    "TextChunk",
    "TextHead",
    "TextTail",
    "VisionChunk",
    "VisionHead",
    "autocast_dtype_of",
    "dtype_of",
]

Sized = torch.Tensor | TensorSpec  # an argument of output_spec, which reads only its shape


class Chunk(nn.Module):
    """A part of a Hugging Face model.

    ``model`` has the whole model's class and config, but only this chunk's parts. It supports whatever a model of
    transformers does, such as activation checkpointing, and its parameters have their names in the whole model.
    ``output_spec`` returns the specs of what ``forward`` returns for inputs of the given shapes.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.tied: dict[str, list[str]] = {}  # the names of Parameters of the whole model that have several

    @property
    def config(self) -> PreTrainedConfig:
        """The config of the whole model."""
        return self.model.config

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that the chunk has."""
        return layers_of(self.model)

    def whole_model_name(self, name: str) -> str:
        """The name of a tensor of ``state_dict`` in the whole model, which checkpoints use."""
        return name.removeprefix("model.")

    @property
    def _tower(self) -> Any:
        return self.model.model.visual

    def _spec(self, shape: tuple[int, ...], dtype: torch.dtype, *inputs: TensorSpec) -> TensorSpec:
        """A spec that requires a gradient if an input or a parameter does."""
        wanted = any(spec.requires_grad for spec in inputs)
        return TensorSpec(shape, dtype, wanted or any(p.requires_grad for p in self.parameters()))


class TextChunk(Chunk):
    """Language layers: hidden states in, hidden states out."""

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _run(decoder_of(self.model), attention_mask, position_ids, inputs_embeds=hidden)

    def output_spec(self, hidden: TensorSpec, **_: Any) -> TensorSpec:
        return self._spec(hidden.shape, hidden.dtype, hidden)


class TextHead(Chunk):
    """The token embedding and the first language layers."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _run(decoder_of(self.model), attention_mask, position_ids, input_ids=input_ids)

    def output_spec(self, input_ids: Sized, **_: Any) -> TensorSpec:
        return self._spec(_embedded(self, input_ids), dtype_of(self.model))


class TextTail(TextChunk):
    """The last language layers, the final norm and the head: hidden states in, logits out."""

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _run(self.model, attention_mask, position_ids, inputs_embeds=hidden)

    def output_spec(self, hidden: TensorSpec, **_: Any) -> TensorSpec:
        vocabulary = self.config.get_text_config().vocab_size
        return self._spec((*hidden.shape[:-1], vocabulary), autocast_dtype_of(self.model), hidden)


class VisionChunk(Chunk):
    """Blocks of the vision tower: patches of all images and of all videos in and out.

    Both are [patches, width] in image order. Without images they have no rows and no gradient, and no parameter gets a
    gradient.
    """

    def forward(
        self,
        images: torch.Tensor,
        videos: torch.Tensor,
        *,
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._see("image", images, image_grid_thw), self._see("video", videos, video_grid_thw)

    def output_spec(self, images: TensorSpec, videos: TensorSpec, **_: Any) -> tuple[TensorSpec, TensorSpec]:
        same_images = self._patches(images.shape, images.dtype, images)
        return same_images, self._patches(videos.shape, videos.dtype, videos)

    def _see(self, kind: str, patches: torch.Tensor, grid: torch.Tensor | None) -> torch.Tensor:
        if not len(patches):
            return patches
        if grid is None:
            raise ValueError(f"{len(patches)} patches need their {kind}_grid_thw, got None")
        output = self._tower(patches, grid_thw=grid.to(patches.device))
        grouped: torch.Tensor = getattr(output, "pooler_output", output)
        return grouped.reshape(len(patches), -1)

    def _patches(self, shape: tuple[int, ...], dtype: torch.dtype, *inputs: TensorSpec) -> TensorSpec:
        return self._spec(shape, dtype, *inputs) if shape[0] else TensorSpec(shape, dtype)


class VisionHead(VisionChunk):
    """The patch embedding and the first blocks of the vision tower. Without images its outputs have no rows."""

    def forward(  # type: ignore[override]  # the arguments of the first chunk are a microbatch's inputs
        self,
        *,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(
            self._pixels(pixel_values),
            self._pixels(pixel_values_videos),
            image_grid_thw=image_grid_thw,
            video_grid_thw=video_grid_thw,
        )

    def output_spec(  # type: ignore[override]
        self, *, pixel_values: Sized | None = None, pixel_values_videos: Sized | None = None, **_: Any
    ) -> tuple[TensorSpec, TensorSpec]:
        return self._embedded(pixel_values), self._embedded(pixel_values_videos)

    def _embedded(self, pixels: Sized | None) -> TensorSpec:
        rows = 0 if pixels is None else pixels.shape[0]
        return self._patches((rows, self._tower.patch_embed.embed_dim), autocast_dtype_of(self._tower))

    def _pixels(self, pixels: torch.Tensor | None) -> torch.Tensor:
        tower = self._tower
        if pixels is not None and len(pixels):
            return pixels.to(dtype_of(tower))
        nothing = self._embedded(None)
        return torch.empty(nothing.shape, dtype=nothing.dtype, device=next(tower.parameters()).device)


class MergingChunk(Chunk):
    """The end of the vision tower and the start of the language model.

    Merges patches, embeds tokens, inserts the images, and runs the first language layers.
    """

    def forward(
        self,
        images: torch.Tensor,
        videos: torch.Tensor,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
    ) -> torch.Tensor:
        vision: dict[str, torch.Tensor | None] = {}
        if len(images):
            vision |= {"pixel_values": images, "image_grid_thw": image_grid_thw}
        if len(videos):
            vision |= {"pixel_values_videos": videos, "video_grid_thw": video_grid_thw}
        if vision and position_ids is None:
            raise ValueError(
                "a microbatch with images needs position_ids among its inputs, because other stages have no tokens to "
                "compute them from: add hf.position_ids(config, input_ids, attention_mask, image_grid_thw)"
            )
        return _run(self.model.model, attention_mask, position_ids, input_ids=input_ids, **vision)

    def output_spec(
        self, images: TensorSpec, videos: TensorSpec, *, input_ids: Sized, **_: Any
    ) -> TensorSpec:
        return self._spec(_embedded(self, input_ids), dtype_of(decoder_of(self.model)), images, videos)


def _run(
    model: nn.Module,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    **inputs: torch.Tensor | None,
) -> torch.Tensor:
    """Return the first output of a transformers model: hidden states, or logits of the outermost model."""
    if position_ids is not None and position_ids.dim() == 1:
        position_ids = position_ids[None]
    masks = {"attention_mask": attention_mask, "position_ids": position_ids}
    output: torch.Tensor = model(**inputs, **masks, use_cache=False)[0]
    return output


def _embedded(chunk: Chunk, input_ids: Sized) -> tuple[int, ...]:
    return (*input_ids.shape, chunk.config.get_text_config().hidden_size)


def dtype_of(part: nn.Module) -> torch.dtype:
    """The dtype of the weights, hence of an embedding's output and of the hidden states that layers add to."""
    return next(parameter.dtype for parameter in part.parameters())


def autocast_dtype_of(part: nn.Module) -> torch.dtype:
    """The dtype that a linear or convolutional layer of ``part`` returns."""
    parameter = next(part.parameters())
    kind = parameter.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype
