"""Proves that a model only runs its parts in order, by running the whole forward with a probe in place of each part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ldt._torch_private import tree_leaves
from ldt.integrations.hf.meta_model import PassOn, decoder_of

__all__ = ["prove_text", "prove_vision"]

_TOKENS = 3


class _Call(NamedTuple):
    """A call of a part: its first argument, the tensors in the other arguments, and its result."""

    part: str
    given: torch.Tensor
    others: list[torch.Tensor]
    returned: torch.Tensor


class _Probe(PassOn):
    """Records its calls, and returns unique numbers so that each result can be recognized."""

    def __init__(self, absent: nn.Module, part: str, width: int | None, calls: list[_Call]) -> None:
        super().__init__(absent)
        self._part, self._width, self._calls = part, width, calls

    def forward(self, hidden: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        shape = hidden.shape if self._width is None else (*hidden.shape, self._width)
        first = 1000.0 * (1 + len(self._calls))
        returned = (first + torch.arange(math.prod(shape))).reshape(shape).requires_grad_()
        leaves = [leaf for leaf in tree_leaves((others, named)) if isinstance(leaf, torch.Tensor)]
        self._calls.append(_Call(self._part, hidden, leaves, returned))
        return returned


def prove_text(model: PreTrainedModel) -> None:
    """Raise ValueError unless ``model`` runs each of its parts once, in order, and nothing between them.

    The parts are embedding, layers, norm and head. Each must get the result of the previous one, and nothing else that
    is computed from tokens or weights, which another chunk would not have.
    """
    decoder, tokens = _any(decoder_of(model)), torch.arange(_TOKENS)[None]
    calls: list[_Call] = []
    width = model.config.get_text_config().hidden_size
    parts = ["the embedding", *_numbered("layer", decoder.layers), "the final norm", "the head"]
    decoder.embed_tokens = _Probe(decoder.embed_tokens, parts[0], width, calls)
    for index, layer in enumerate(decoder.layers):
        decoder.layers[index] = _Probe(layer, parts[1 + index], None, calls)
    decoder.norm = _Probe(decoder.norm, parts[-2], None, calls)
    _any(model).lm_head = _Probe(_any(model).lm_head, parts[-1], None, calls)
    model(input_ids=tokens, use_cache=False)
    _refuse_other_order(parts, calls)
    for before, after in pairwise(calls):
        if not torch.equal(before.returned, after.given):
            raise ValueError(f"what {after.part} gets is not what {before.part} returns")
    for call in calls:
        if any(other.requires_grad or _shares(other, tokens) for other in call.others):
            raise ValueError(f"{call.part} gets more of the tokens or of other parts than hidden states")


def prove_vision(model: PreTrainedModel, run: Callable[[], object]) -> None:
    """Likewise for the blocks of the vision tower, which ``run`` runs. Patches are in window order there."""
    tower = _any(model).model.visual
    calls: list[_Call] = []
    parts = _numbered("block", tower.blocks)
    for index, block in enumerate(tower.blocks):
        tower.blocks[index] = _Probe(block, parts[index], None, calls)
    run()
    _refuse_other_order(parts, calls)


def _numbered(kind: str, modules: nn.ModuleList) -> list[str]:
    return [f"{kind} {index}" for index in range(len(modules))]


def _refuse_other_order(parts: list[str], calls: list[_Call]) -> None:
    called = [call.part for call in calls]
    for part in parts:
        if called.count(part) != 1:
            raise ValueError(f"it runs {part} {called.count(part)} times, expected once")
    for part, other in _differences(parts, called):
        raise ValueError(f"it runs {other} where {part} was expected")


def _differences(parts: list[str], called: list[str]) -> Iterator[tuple[str, str]]:
    return ((part, other) for part, other in zip(parts, called, strict=True) if part != other)


def _shares(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _any(module: Any) -> Any:
    return module
