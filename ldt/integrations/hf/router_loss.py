"""The load balancing loss of mixtures of experts, exact over the layers of all chunks.

The loss of transformers is not a sum over layers: it multiplies means over all layers and tokens. So chunks pass on the
sums that it is made of, behind their hidden states, and the last one computes it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from ldt.integrations.hf.chunks import Chunk, TextChunk, TextHead, TextTail
from ldt.integrations.hf.meta_model import decoder_of, layers_of
from ldt.runtime.common.auxiliary_loss import add_loss
from ldt.runtime.common.tensor_spec import TensorSpec

__all__ = [
    "RoutedChunk",
    "RoutedHead",
    "RoutedTail",
    "check_router_loss",
    "wants_router_loss",
    "without_router_loss",
]

NAME = "router"  # in StepResult.auxiliary
_FLAG = "output_router_logits"
_SUMS_DTYPE = torch.float64  # is never compressed


def wants_router_loss(config: PreTrainedConfig) -> bool:
    """Whether the model adds the loss of its routers."""
    return bool(getattr(config.get_text_config(), _FLAG, False))


def without_router_loss(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of ``config`` whose model computes no such loss: each chunk would, of its own layers."""
    quiet = copy.deepcopy(config)
    for part in {id(part): part for part in (quiet, quiet.get_text_config())}.values():
        if hasattr(part, _FLAG):
            setattr(part, _FLAG, False)
    return quiet


def check_router_loss(model: PreTrainedModel) -> None:
    """Raise ValueError unless the loss of ``model``'s class is the one that chunks compute."""
    try:
        experts, top_k, _ = _settings(model)
        theirs = sys.modules[type(model).__module__].load_balancing_loss_func
    except AttributeError as error:
        raise ValueError(f"the loss of its routers is not the one of Mixtral: {error}") from None
    generator = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(6, experts, generator=generator) for _ in range(3))
    for mask in (None, torch.tensor([[1, 1, 0], [1, 0, 0]])):
        first, rest = (_sums(part, top_k, mask) for part in (layers[:1], layers[1:]))
        if not torch.allclose(_loss(first + rest).float(), theirs(layers, experts, top_k, mask)):
            raise ValueError("the loss of its routers is not the one of Mixtral")


def _settings(model: Any) -> tuple[int, int, float]:
    """The number of experts, how many a token has, and the weight of the loss."""
    return int(model.num_experts), int(model.num_experts_per_tok), float(model.router_aux_loss_coef)


class _Routed(Chunk):
    """A chunk that adds the sums of its layers."""

    def _spec_of_sums(self, *inputs: TensorSpec) -> TensorSpec:
        return self._spec((2 * _settings(self.model)[0] + 1,), _SUMS_DTYPE, *inputs)

    def _run_routed(
        self, model: PreTrainedModel, attention_mask: torch.Tensor | None, **inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first output of ``model``, which is or contains the decoder, and the sums of its layers."""
        experts, top_k, _ = _settings(self.model)
        found: list[Any] = []
        decoder = decoder_of(self.model)
        hook = decoder.register_forward_hook(lambda module, args, output: found.append(output))
        try:
            wanted = {_FLAG: bool(layers_of(self.model))}
            result = model(attention_mask=attention_mask, use_cache=False, **inputs, **wanted)
        finally:
            hook.remove()
        output = result[0] if model is decoder else result.logits  # behind a loss of its own layers
        logits = getattr(found[0], "router_logits", None) or ()
        sums = (
            _sums(logits, top_k, attention_mask)
            if logits
            else output.new_zeros(2 * experts + 1, dtype=_SUMS_DTYPE)
        )
        return output, sums


class RoutedHead(_Routed, TextHead):
    """The token embedding and the first layers, which returns sums behind the hidden states."""

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._run_routed(
            decoder_of(self.model), attention_mask, position_ids=_rows(position_ids), input_ids=input_ids
        )

    def output_spec(self, input_ids: Any, **_: Any) -> tuple[TensorSpec, TensorSpec]:  # type: ignore[override]
        return super().output_spec(input_ids), self._spec_of_sums()


class RoutedChunk(_Routed, TextChunk):
    """Layers: hidden states and sums in and out."""

    def forward(  # type: ignore[override]
        self,
        hidden: torch.Tensor,
        sums: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, own = self._run_routed(
            decoder_of(self.model), attention_mask, position_ids=_rows(position_ids), inputs_embeds=hidden
        )
        return output, sums + own

    def output_spec(  # type: ignore[override]
        self, hidden: TensorSpec, sums: TensorSpec, **_: Any
    ) -> tuple[TensorSpec, TensorSpec]:
        return super().output_spec(hidden), self._spec_of_sums(hidden, sums)


class RoutedTail(_Routed, TextTail):
    """The last layers, the final norm and the head. Adds the loss."""

    def forward(  # type: ignore[override]
        self,
        hidden: torch.Tensor,
        sums: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        logits, own = self._run_routed(
            self.model, attention_mask, position_ids=_rows(position_ids), inputs_embeds=hidden
        )
        return add_loss(logits, _loss(sums + own), NAME, _settings(self.model)[2])

    def output_spec(self, hidden: TensorSpec, sums: TensorSpec, **_: Any) -> TensorSpec:  # type: ignore[override]
        return super().output_spec(hidden)


def _rows(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    return position_ids[None] if position_ids is not None and position_ids.dim() == 1 else position_ids


def _sums(layers: Sequence[torch.Tensor], top_k: int, mask: torch.Tensor | None) -> torch.Tensor:
    """What the loss needs of ``layers``, each [tokens, experts]: tokens and probabilities per expert, and all tokens.

    A token counts once for each of its ``top_k`` experts. Tokens that ``mask`` [batch, sequence] leaves out do not.
    """
    total = torch.zeros(2 * layers[0].shape[-1] + 1, dtype=_SUMS_DTYPE, device=layers[0].device)
    for logits in layers:
        probabilities = functional.softmax(logits, dim=-1).to(_SUMS_DTYPE)
        chosen = functional.one_hot(probabilities.detach().topk(top_k, dim=-1).indices, logits.shape[-1]).sum(
            1
        )
        counts = torch.ones(len(logits), dtype=_SUMS_DTYPE, device=logits.device)
        if mask is not None:
            counts = mask.reshape(-1).to(counts)
        own = (chosen * counts[:, None]).sum(0), (probabilities * counts[:, None]).sum(0), counts.sum()[None]
        total = total + torch.cat(own)
    return total


def _loss(sums: torch.Tensor) -> torch.Tensor:
    """The number of experts, times the sum over experts of the share of tokens times the mean probability."""
    experts = len(sums) // 2
    tokens, probabilities = sums[:experts] / sums[-1], sums[experts:-1] / sums[-1]
    return experts * (tokens * probabilities).sum()
