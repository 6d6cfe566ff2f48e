"""Adapters of peft in a chunk, which stays the chunk that it is."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from ldt.integrations.hf.chunks import Chunk
from ldt.integrations.hf.skeleton import has_layers

__all__ = ["add_adapter"]


def add_adapter(chunks: Iterable[Chunk], config: Any, adapter_name: str = "default") -> None:
    """Put the adapters of a ``peft`` config, such as LoraConfig, into ``chunks`` and freeze all other weights.

    ``peft.get_peft_model`` would wrap a chunk in a module that hides which keywords its forward takes. A chunk that
    has none of the config's target modules is frozen. Call it once weights are loaded;
    ``peft.get_peft_model_state_dict(chunk.model)`` then gives a chunk's adapter weights by their names in the whole
    model. Raises ValueError if these chunks have layers, but none has a target.
    """
    from peft import inject_adapter_in_model  # an optional dependency of an optional dependency

    chunks = list(chunks)
    refusals = []
    for chunk in chunks:
        try:
            # A copy: peft writes the names that it finds in the first chunk into the config.
            inject_adapter_in_model(copy.deepcopy(config), chunk.model, adapter_name)
        except ValueError as error:
            if _has_adapters(chunk):
                raise
            refusals.append(error)
            chunk.requires_grad_(False)
    if len(refusals) == len(chunks) and any(has_layers(chunk.model) for chunk in chunks):
        raise refusals[0]


def _has_adapters(chunk: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(part, BaseTunerLayer) for part in chunk.modules())
