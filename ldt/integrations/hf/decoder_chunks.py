"""The chunks of the second lap of a model with an encoder: the decoder's layers, and what is around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ldt.integrations.hf.chunks import Sized, autocast_dtype_of, dtype_of
from ldt.integrations.hf.encoder_chunks import EncoderChunk, EncoderHead, LapChunk, calls_in
from ldt.integrations.hf.hop_values import decode, encode, encode_specs
from ldt.integrations.hf.lap_inputs import Media, needed_outputs, parameters_of, relayed_names
from ldt.integrations.hf.stacks import Part, find_laps, keep
from ldt.runtime.common.tensor_spec import TensorSpec

__all__ = ["BridgeChunk", "DecoderChunk", "DecoderTail", "lap_chunk"]

_Inputs = Mapping[str, Any]


class DecoderChunk(LapChunk):
    """Layers of the decoder.

    A hop carries what a layer returns, and the values of ``relayed_names``: the encoder's outputs, or features of
    images that are added to the hidden states of later layers.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._relayed = relayed_names(self.model, self.laps.decoder)

    def forward(
        self,
        *hop: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        masks = attention_mask, position_ids, token_type_ids, decoder_attention_mask
        module, relayed, inputs = self._entered(hop, *masks)
        hidden, named = self._until_stopped(module, inputs)
        return self._left(hidden, named, relayed)

    def output_spec(self, *hop: TensorSpec, **_: Any) -> tuple[TensorSpec, ...]:
        returned, relayed = decode(hop)
        hidden, *carried = returned if isinstance(returned, tuple) else (returned,)
        spec = self._spec(hidden.shape, hidden.dtype, hidden)
        named = dict(zip(self.laps.of_decoder.carried, carried, strict=True))
        others = self._still_needed(dict(zip(self._relayed, relayed, strict=True)))
        return encode_specs([self.laps.of_decoder.returned(spec, named), others])

    def _entered(
        self, hop: Sequence[torch.Tensor], attention: Any, positions: Any, types: Any, decoder_attention: Any
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Return what to run with which inputs, and the relayed values."""
        returned, values = decode(hop)
        self.laps.state.entering = returned
        relayed = dict(zip(self._relayed, values, strict=True))
        hidden = returned[0] if isinstance(returned, tuple) else returned
        if positions is not None and positions.dim() == 1:
            positions = positions[None]
        given = {"attention_mask": attention, "position_ids": positions}
        given |= {"token_type_ids": types, "decoder_attention_mask": decoder_attention}
        module: Any = self.model
        if relayed.get("encoder_hidden_states") is not None:
            given["encoder_outputs"] = BaseModelOutput(last_hidden_state=relayed["encoder_hidden_states"])
            given["decoder_inputs_embeds"] = hidden
        else:
            given["inputs_embeds"] = hidden
        if relayed.get("deepstack_visual_embeds") is not None:
            module = self.model.get_submodule(self.laps.decoder.root)
            given["visual_pos_masks"] = relayed["visual_pos_masks"]
            given["deepstack_visual_embeds"] = self._features(relayed["deepstack_visual_embeds"])
        return module, relayed, {name: value for name, value in given.items() if value is not None}

    def _features(self, features: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The features of images for each layer, with zero for those of earlier chunks, which have added them."""
        first = self.part.layers.start
        return [torch.zeros_like(f[:1]) if index < first else f for index, f in enumerate(features)]

    def _left(
        self, hidden: torch.Tensor, named: _Inputs, relayed: dict[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        returned = self.laps.of_decoder.returned(hidden, named)
        return encode([returned, self._still_needed(relayed)], hidden.device)

    def _still_needed(self, relayed: dict[str, Any]) -> tuple[Any, ...]:
        features = relayed.get("deepstack_visual_embeds")
        if features is not None and self.part.layers.stop >= len(features):
            relayed = relayed | {"visual_pos_masks": None, "deepstack_visual_embeds": None}
        return tuple(relayed.get(name) for name in self._relayed)


class DecoderTail(DecoderChunk):
    """The last layers of the decoder and what is behind them: returns logits."""

    def forward(  # type: ignore[override]
        self,
        *hop: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        masks = attention_mask, position_ids, token_type_ids, decoder_attention_mask
        module, _, inputs = self._entered(hop, *masks)
        try:
            logits: torch.Tensor = module(**inputs, use_cache=False)[0]
        finally:
            self.laps.state.clear()
        return logits

    output_spec = None  # type: ignore[assignment]


class BridgeChunk(DecoderChunk):
    """The end of the encoder, and the begin of the decoder. Takes all inputs of the model."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._media = Media(self.model)
        self._needed = needed_outputs(self.model, self.laps.encoder)
        root = self.model.get_submodule(self.laps.decoder.root)
        if "deepstack_visual_embeds" in parameters_of(root):
            root.register_forward_pre_hook(self.laps.state.see_call, with_kwargs=True)

    def forward(self, *hop: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, ...]:
        given = self._media.present(inputs)
        state = self.laps.state
        state.replayed = [
            dict(zip(self._needed, (*kept, hidden), strict=True)) for hidden, kept, _ in calls_in(hop)
        ]
        hidden, named = self._until_stopped(self.model, given)
        return self._left(hidden, named, {**named, **state.take_call()})

    def output_spec(self, *hop: TensorSpec, **inputs: Sized) -> tuple[TensorSpec, ...]:
        calls = calls_in(hop)
        crosses = "encoder_hidden_states" in self._relayed
        tokens = tuple(inputs["decoder_input_ids" if crosses else "input_ids"].shape)
        config: Any = self.config.get_text_config(decoder=True)
        decoder = self.model.get_submodule(self.laps.decoder.root)
        hidden = self._spec((*tokens, config.hidden_size), dtype_of(decoder), *(call[0] for call in calls))
        relayed: dict[str, Any] = {}
        if crosses:
            relayed["encoder_hidden_states"] = seen = self._of_encoder(
                calls[0][0].shape, calls[0][0].dtype, calls
            )
            carried = self._carried(tokens, seen.shape[1])
        elif calls and "deepstack_visual_embeds" in self._relayed:
            relayed["visual_pos_masks"] = TensorSpec(tokens, torch.bool)
            relayed["deepstack_visual_embeds"] = self._features_of(calls, config.hidden_size)
            carried = {}
        else:
            carried = {}
        return encode_specs([self.laps.of_decoder.returned(hidden, carried), self._still_needed(relayed)])

    def _of_encoder(self, shape: tuple[int, ...], dtype: torch.dtype, calls: Sequence[Any]) -> TensorSpec:
        """The spec of what the end of the encoder computes from ``calls``."""
        root = self.model.get_submodule(self.laps.encoder.root)
        outputs = [output for hidden, kept, _ in calls for output in (hidden, *kept)]
        trained = any(p.requires_grad for p in root.parameters()) or any(o.requires_grad for o in outputs)
        return TensorSpec(shape, dtype, trained)

    def _features_of(self, calls: Sequence[Any], width: int) -> tuple[TensorSpec, ...]:
        """One for each output of the encoder that is kept: all images and videos, a row for each group of patches."""
        tower: Any = self.model.get_submodule(self.laps.encoder.root)
        rows = sum(hidden.shape[0] for hidden, _, _ in calls) // tower.spatial_merge_size**2
        spec = self._of_encoder((rows, width), autocast_dtype_of(tower), calls)
        return (spec,) * len(tower.deepstack_visual_indexes)

    def _carried(self, tokens: Sequence[int], encoded: int) -> dict[str, TensorSpec]:
        """The specs of biases of positions, which the first layer computes for all others."""
        first: Any = self.laps.decoder.list_of(self.model)[0]
        tables = [part for name, part in first.named_modules() if name.endswith("relative_attention_bias")]
        if not tables or not self.laps.of_decoder.carried:
            return {}
        weight = tables[0].weight
        checkpointing = any(getattr(part, "gradient_checkpointing", False) for part in first.modules())
        own = TensorSpec((1, weight.shape[1], tokens[1], tokens[1]), weight.dtype, weight.requires_grad)
        crossed = TensorSpec(
            (1, weight.shape[1], tokens[1], encoded),
            autocast_dtype_of(first),
            checkpointing and first.training,
        )
        return dict(zip(self.laps.of_decoder.carried, (own, crossed), strict=True))


def lap_chunk(model: PreTrainedModel, part: Part) -> LapChunk:
    """Make the chunk that has ``part`` of a whole model on the meta device."""
    laps = find_laps(model)
    kind: type[LapChunk] = EncoderChunk if part.in_encoder else DecoderChunk
    if part.begins:
        kind = EncoderHead if part.in_encoder else BridgeChunk
    elif part.ends:
        kind = DecoderTail
    keep(model, laps, part)
    return kind(model, laps, part)
