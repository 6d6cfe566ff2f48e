"""Adds adapters of peft to chunks without wrapping them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ldt.integrations.hf.chunks import Chunk
from ldt.integrations.hf.seeded_init import drawn_by_name

__all__ = ["add_adapter"]


def add_adapter(
    chunks: Iterable[Chunk], config: Any, adapter_name: str = "default", *, seed: int = 0
) -> None:
    """Add the adapters of a ``peft`` config, such as LoraConfig, to ``chunks`` and freeze all other weights.

    Use it instead of ``peft.get_peft_model``, which would wrap a chunk in a module that hides the keywords of its
    forward. A chunk without any target module of the config is frozen. Call it after loading weights;
    ``peft.get_peft_model_state_dict(chunk.model)`` then returns a chunk's adapter weights by their names in the whole
    model.

    An adapter's random numbers depend on ``seed``, its name, its module's name and the device, as in ``init_weights``.
    So they do not depend on how the model is split, and differ between stages.

    Raises ValueError if these chunks have layers but no target module, or if adapters of this kind are not added module
    by module.
    """
    tuner = _drawing_by_name(config, seed)
    chunks = list(chunks)
    refusals = []
    for chunk in chunks:
        try:
            # A copy, because peft writes the names it finds in the first chunk into the config.
            tuner(chunk.model, copy.deepcopy(config), adapter_name)
        except ValueError as error:
            if _has_adapters(chunk):
                raise
            refusals.append(error)
            chunk.requires_grad_(False)
    if len(refusals) == len(chunks) and any(chunk.layers for chunk in chunks):
        raise refusals[0]


def _drawing_by_name(config: Any, seed: int) -> Any:
    """Return peft's tuner class for ``config``, changed to draw each adapter by the name of its module."""
    from peft import PEFT_TYPE_TO_TUNER_MAPPING  # an optional dependency of an optional dependency
    from peft.tuners.tuners_utils import BaseTuner

    known: Any = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type, object)
    if not issubclass(known, BaseTuner) or getattr(known, "uses_shared_state", False):
        raise ValueError(
            f"{type(config).__name__} does not put an adapter of its own into each module, which chunks require: use "
            "another kind, such as LoraConfig"
        )

    class Tuner(known):  # type: ignore[misc]  # known only at run time
        def _create_and_replace(
            self,
            config: Any,
            adapter_name: str,
            target: nn.Module,
            *place: Any,
            current_key: str,
            **options: Any,
        ) -> None:
            device = _device_of(target)
            options["current_key"] = current_key
            with torch.device(device), drawn_by_name(seed, f"{adapter_name} {current_key}", device):
                super()._create_and_replace(config, adapter_name, target, *place, **options)

    return Tuner


def _device_of(target: nn.Module) -> torch.device:
    """Return where adapters of ``target`` are drawn: on its device, if that has memory."""
    devices = (parameter.device for parameter in target.parameters() if not parameter.is_meta)
    return next(devices, torch.device("cpu"))


def _has_adapters(chunk: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(part, BaseTunerLayer) for part in chunk.modules())
