"""Creates transformers models on the meta device and removes the parts that a chunk does not hold."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

__all__ = [
    "decoder_of",
    "keep_text",
    "keep_vision",
    "layers_of",
    "materialize",
    "meta_model",
    "model_class",
    "tied_names",
    "with_owners",
]

_UNSET = -113  # marks buffer elements that have not been computed


class PassOn(nn.Module):
    """Replaces a layer, norm or embedding of another chunk. Returns its first argument.

    It keeps the plain attributes of the original, because a model may ask a layer for its kind of attention.
    """

    def __init__(self, absent: nn.Module) -> None:
        super().__init__()
        for name, value in vars(absent).items():
            if not name.startswith("_") and isinstance(value, (str, int, float)):
                setattr(self, name, value)

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


class GroupPatches(nn.Module):
    """Replaces the merger: returns the patches that it would merge, [patches / group, group * width], unchanged.

    The tower reorders the merger's output from window order to image order, whatever its width. So patches cross hops
    in image order, and every chunk reorders them.
    """

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return patches.reshape(-1, self.group * patches.shape[-1])


def model_class(config: PreTrainedConfig, laps: int) -> Any:
    """Return the model class for ``laps`` laps over the stages. Raises ValueError if there is none."""
    kinds = [_classes(config, number) for number in (1, 2)]
    if not kinds[laps - 1]:
        kind = "causal language model" if laps == 1 else "vision-language model"
        hint = f"; it has one for laps={3 - laps}" if kinds[2 - laps] else ""
        raise ValueError(
            f"laps={laps} needs the config of a {kind}, but transformers has none for "
            f"{type(config).__name__} (model type {config.model_type!r}){hint}"
        )
    return kinds[laps - 1][0]


def _classes(config: PreTrainedConfig, laps: int) -> list[Any]:
    mappings = [MODEL_FOR_CAUSAL_LM_MAPPING]
    if laps == 2:
        mappings = [
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
            MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        ]
    return [mapping[type(config)] for mapping in mappings if type(config) in mapping]


def meta_model(
    config: PreTrainedConfig,
    laps: int,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Return the model on the meta device: modules and shapes, no memory. Its config is a copy.

    With one lap a vision-language model has no tower.
    """
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config, laps)._from_config(copy.deepcopy(config), **options)
    model.tie_weights()  # some versions of transformers tie only weights with memory
    if laps == 1:
        _remove_towers(model)
    return model


def _remove_towers(model: PreTrainedModel) -> None:
    """Leave only the language model of a vision-language model that transformers also lists as a causal one."""
    inner: Any = getattr(model, "model", model)
    if hasattr(inner, "language_model"):
        for name, part in list(inner.named_children()):
            if part is not inner.language_model:
                setattr(inner, name, nn.Identity())


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The names of each Parameter that has several, by each of them."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {name: same for same in names.values() if len(same) > 1 for name in same}


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part that has the language layers."""
    decoder: PreTrainedModel = getattr(model.model, "language_model", model.model)
    return decoder


def keep_text(model: PreTrainedModel, layers: Iterable[int], *, embedding: bool, head: bool) -> int:
    """Remove everything from the language model except ``layers`` and, if set, its embedding, final norm and head.

    If embedding and head are one Parameter, the head keeps the embedding as well, for its name. Returns the original
    number of layers.
    """
    decoder: Any = decoder_of(model)
    _keep_items(decoder.layers, layers)
    tied = model.lm_head.weight is decoder.embed_tokens.weight
    if not (embedding or (head and tied)):
        decoder.embed_tokens = PassOn(decoder.embed_tokens)
    if not head:
        decoder.norm, model.lm_head = PassOn(decoder.norm), PassOn(model.lm_head)
    return len(decoder.layers)


def keep_vision(model: PreTrainedModel, blocks: Iterable[int], *, embedding: bool, merger: bool) -> int:
    """Likewise for the vision tower: its blocks, patch embedding and merger."""
    tower: Any = model.model.visual
    _keep_items(tower.blocks, blocks)
    if not embedding:
        tower.patch_embed = PassOn(tower.patch_embed)
    if not merger:
        tower.merger = GroupPatches(tower.spatial_merge_size**2)
    return len(tower.blocks)


def _keep_items(modules: nn.ModuleList, kept: Iterable[int]) -> None:
    kept = set(kept)
    for index in range(len(modules)):
        if index not in kept:
            modules[index] = PassOn(modules[index])


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the language model and blocks of the vision tower that the model still has."""
    decoder: Any = decoder_of(model)
    parts = [*getattr(getattr(model.model, "visual", None), "blocks", ()), *decoder.layers]
    return [part for part in parts if not isinstance(part, PassOn)]


def materialize(
    model: PreTrainedModel,
    device: torch.device,
    shared: dict[str, nn.Parameter],
    tied: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Allocate parameters on ``device``, filled with NaN until they are loaded, and compute constant buffers.

    ``shared`` maps names to the Parameters of chunks built before, and gets those of this one. So a name that two
    chunks have, that of a tied embedding, stays one Parameter, as do the names that are ``tied`` to each other.
    """
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            found = next((shared[same] for same in (name, *tied.get(name, ())) if same in shared), None)
            made[id(parameter)] = _filled(parameter, device) if found is None else found
        shared[name] = made[id(parameter)]
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._parameters[attribute] = shared[name]
    for name, buffer in list(model.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = torch.full_like(buffer, _UNSET, device=device)
    _compute_buffers(model)
    lost = [name for name, buffer in model.named_buffers() if (buffer == _UNSET).any()]
    if lost:
        raise ValueError(
            f"buffer {lost[0]} has values that only its constructor computes, which ran on the meta device"
        )


def _compute_buffers(model: PreTrainedModel) -> None:
    """Fill buffers with their initial values, such as the frequencies of rotary embeddings."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for _, part, owner in with_owners(model):
            if part._buffers:
                owner._init_weights(part)
                for parameter in part.parameters(recurse=False):  # _init_weights may have drawn them, too
                    parameter.fill_(torch.nan)


def _filled(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.full_like(parameter, torch.nan, device=device), parameter.requires_grad)


def with_owners(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield all modules with their names and the innermost model that contains them, whose config applies."""
    models = {"": model}
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel):
            models[name] = part
        owner = name
        while owner not in models:
            owner = owner.rpartition(".")[0]
        yield name, part, models[owner]
