"""The chunks of the first lap of a model with an encoder: the encoder's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ldt.integrations.hf.chunks import Chunk
from ldt.integrations.hf.hop_values import decode, encode, encode_specs
from ldt.integrations.hf.lap_inputs import Media, needed_outputs
from ldt.integrations.hf.stacks import Laps, Part
from ldt.integrations.hf.stand_ins import Reached
from ldt.runtime.common.tensor_spec import TensorSpec

__all__ = ["EncoderChunk", "EncoderHead", "LapChunk", "calls_in"]

_Inputs = Mapping[str, Any]


class LapChunk(Chunk):
    """A chunk of either lap. ``laps`` says what stands in for the parts of other chunks in ``model``."""

    def __init__(self, model: PreTrainedModel, laps: Laps, part: Part) -> None:
        super().__init__(model)
        self.laps, self.part = laps, part

    @property
    def layers(self) -> list[nn.Module]:
        stack = self.laps.encoder if self.part.in_encoder else self.laps.decoder
        found = stack.list_of(self.model)
        return [found[index] for index in self.part.layers]

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    def _until_stopped(self, module: Any, inputs: _Inputs) -> tuple[torch.Tensor, dict[str, Any]]:
        """Run ``module`` until it comes to a layer of another chunk. Returns what that gets."""
        try:
            module(**inputs, use_cache=False)
        except Reached:
            assert self.laps.state.leaving is not None
            return self.laps.state.leaving
        finally:
            self.laps.state.clear()
        raise ValueError("its forward ended without running the layers of the next chunk")


class EncoderChunk(LapChunk):
    """Layers of the encoder. For each call of the encoder, a hop carries a nested value, see ``hop_values``.

    That is: the hidden states, the outputs of earlier layers that something else than the next layer needs, and what
    layers get beside hidden states (masks, positions). Without images or sound a hop is one tensor without elements.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._needed = needed_outputs(self.model, self.laps.encoder)
        self._own = [index for index in self.part.layers if index <= self._needed[-1]]

    def forward(self, *hop: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._encoded([self._run(*value) for value in calls_in(hop)])

    def output_spec(self, *hop: TensorSpec) -> tuple[TensorSpec, ...]:
        return encode_specs([self._run_on_specs(*value) for value in calls_in(hop)]) or hop

    def _run(self, hidden: Any, kept: Sequence[Any], others: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Run this chunk's layers on a value of a hop."""
        outputs, arguments = list(kept), self.laps.of_encoder
        named = dict(zip(arguments.names, others, strict=True))
        layers = self.laps.encoder.list_of(self.model)
        for index in self._own:
            hidden = layers[index](hidden, **arguments.given(named))
            if arguments.carried:
                hidden, *returned = hidden
                named.update(zip(arguments.carried, returned, strict=False))
            if index in self._needed[:-1]:
                outputs.append(hidden)
        return hidden, tuple(outputs), tuple(named.values())

    def _run_on_specs(self, hidden: Any, kept: Any, others: Any) -> tuple[Any, Any, Any]:
        spec = self._spec(hidden.shape, hidden.dtype, hidden) if self._own else hidden
        added = [spec for index in self._own if index in self._needed[:-1]]
        return spec, (*kept, *added), others

    def _encoded(self, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        return encode(values, self._device) or (torch.empty(0, device=self._device),)


class EncoderHead(EncoderChunk):
    """What is before the encoder's layers, and the first of them. Takes all inputs of the model."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._media = Media(self.model)

    def forward(self, **inputs: Any) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return self._encoded([self._run(*value) for value in self._begun(inputs)])

    output_spec = None  # type: ignore[assignment]

    def head_spec(self, **inputs: Any) -> tuple[TensorSpec, ...]:
        """The specs of what ``forward`` returns. They depend on values of inputs, such as sizes of images.

        Runs what is before the layers; also the first layer, if it returns more than hidden states.
        """
        begun = self._begun(inputs)
        if self.laps.of_encoder.carried and self._own:
            all_layers, self._own = self._own, self._own[:1]
            try:
                begun = [self._run(*value) for value in begun]
            finally:
                self._own = all_layers
        values = [self._run_on_specs(*_specs(value)) for value in begun]
        return encode_specs(values) or (TensorSpec.of(torch.empty(0)),)

    def _begun(self, inputs: _Inputs) -> list[tuple[Any, Any, Any]]:
        """What the first layer gets in each call of the encoder."""
        gate: Any = self.laps.encoder.list_of(self.model)
        values = []
        for given in self._media.calls(inputs):
            gate.closed = True
            try:
                hidden, named = self._until_stopped(self.model, given)
            finally:
                gate.closed = False
            others = tuple(named.get(name) for name in self.laps.of_encoder.names)
            values.append((hidden.contiguous(), (), others))
        return values


def calls_in(hop: Sequence[Any]) -> list[Any]:
    """The values of a hop of the encoder, one for each of its calls."""
    return [value for value in decode(hop) if isinstance(value, tuple)]


def _specs(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), value.dtype, value.requires_grad)
    return tuple(map(_specs, value)) if isinstance(value, (tuple, list)) else value
