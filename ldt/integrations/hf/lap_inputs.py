"""What a model with an encoder takes and what its parts need of each other, found in its own structure."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ldt.integrations.hf.stacks import Stack

__all__ = ["Media", "needed_outputs", "parameters_of", "relayed_names"]

_MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values")

# What layers of a decoder may need of an encoder, in addition to hidden states and metadata.
_RELAYED = ("encoder_hidden_states", "visual_pos_masks", "deepstack_visual_embeds")


class Media:
    """The inputs that an encoder runs on: images, videos or sound, or the tokens of an encoder of text."""

    def __init__(self, model: PreTrainedModel) -> None:
        taken = parameters_of(model)
        self._names = [name for name in _MEDIA if name in taken] or ["input_ids"]
        inner: Any = getattr(model, "model", model)
        self._needs_positions = hasattr(inner, "get_rope_index")

    def present(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Those of ``inputs`` that have elements. Raises ValueError if positions of images are missing."""
        found = {name: value for name, value in inputs.items() if value is not None and value.numel()}
        if (
            self._needs_positions
            and "position_ids" not in found
            and any(name in found for name in self._names)
        ):
            raise ValueError(
                "a microbatch with images needs position_ids among its inputs, because other stages have no tokens to "
                "compute them from: add hf.position_ids(config, input_ids, attention_mask, image_grid_thw)"
            )
        return found

    def calls(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The inputs for each call of the encoder, as images and videos are seen one after the other."""
        given = self.present(inputs)
        for name in self._names:
            if name in given:
                yield {key: given[key] for key in given if key == name or key not in self._names}


def needed_outputs(model: PreTrainedModel, encoder: Stack) -> list[int]:
    """The layers of ``encoder`` whose outputs are used: the last one, or those that the config names.

    Raises ValueError if the input of the first layer is used.
    """
    count = len(encoder.list_of(model))
    config: Any = model.config
    chosen = getattr(config, "vision_feature_layer", getattr(config, "vision_feature_layers", -1))
    numbers = [-1] if chosen is None else [chosen] if isinstance(chosen, int) else chosen
    found = {number % (count + 1) - 1 for number in numbers}
    if -1 in found:
        raise ValueError(
            f"it uses what the first layer of {encoder.root} gets, of which other stages know nothing"
        )
    root: Any = model.get_submodule(encoder.root)
    return sorted(found | set(getattr(root, "deepstack_visual_indexes", ())))


def relayed_names(model: PreTrainedModel, decoder: Stack) -> list[str]:
    """What each chunk of the decoder hands on in addition to hidden states, by the names of arguments."""
    taken = parameters_of(model.get_submodule(decoder.root))
    return [name for name in _RELAYED if name in taken]


def parameters_of(module: nn.Module) -> set[str]:
    """The names of what its forward takes."""
    return set(inspect.signature(module.forward).parameters)
