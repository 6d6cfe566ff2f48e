"""Makes chunks and their optimizer by settings: weights, adapters, recomputation, compilation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from transformers import PreTrainedConfig

from ldt.integrations.hf.adapters import add_adapter
from ldt.integrations.hf.chunks import Chunk
from ldt.integrations.hf.optimizer import parameter_groups
from ldt.integrations.hf.quantize import import_bitsandbytes, quantize
from ldt.integrations.hf.settings import Adapter, Optimizer, Settings
from ldt.integrations.hf.split import split
from ldt.integrations.hf.weights import init_weights, load_weights
from ldt.runtime.mesh.mesh import Mesh

__all__ = ["lora_config", "make_chunks", "make_optimizer"]


def make_chunks(
    config: PreTrainedConfig, model: str | os.PathLike[str], settings: Settings, mesh: Mesh
) -> list[Chunk]:
    """Build the chunks of this rank's stage. Raises ValueError for settings that do not fit the model."""
    parts = split(config, settings.layers, laps=settings.laps)
    if parts.num_chunks != mesh.topology.num_chunks or settings.laps != mesh.topology.laps:
        raise ValueError(
            f"layers must have a number for each of the {mesh.topology.num_chunks} chunks of {mesh.topology}, "
            f"got {settings.layers}"
        )
    if settings.weights == "checkpoint" and Path(model).is_file():
        raise ValueError(
            f"the edge trains weights of a checkpoint, got a config alone, {model}: give the folder of both"
        )
    adapter = settings.adapter
    four_bit = adapter is not None and adapter.four_bit
    device = torch.device("cpu") if four_bit else mesh.device
    chunks = parts.build(
        mesh.topology.chunks_of(mesh.stage), device, getattr(torch, str(settings.dtype)), settings.attention
    )
    if settings.weights == "random":
        init_weights(chunks, settings.seed)
    else:
        load_weights(chunks, model)
    if four_bit:
        quantize(chunks, mesh.device)
    if adapter is not None:
        add_adapter(chunks, lora_config(adapter), seed=settings.seed)
    for chunk in chunks:
        if settings.checkpointing:
            whole: Any = chunk.model  # whose method has another name in some versions of transformers
            enable = (
                getattr(whole, "activation_checkpointing_enable", None) or whole.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False})
        for layer in chunk.layers if settings.compile else ():
            layer.compile()
    return chunks


def make_optimizer(
    chunks: Sequence[Chunk], settings: Optimizer, name: str | None = None
) -> torch.optim.Optimizer:
    """Make the optimizer of ``chunks``; ``name`` replaces that of the settings.

    Two parameter groups, with and without weight decay, of which either may be empty. Raises ValueError for an unknown
    name, and ImportError for one that needs bitsandbytes, if that is not installed.
    """
    known = get_args(get_type_hints(Optimizer)["name"])
    if (name or settings.name) not in known:
        raise ValueError(f"optimizer must be one of {', '.join(known)}, got {name!r}")
    chosen: Any = replace(settings, name=name or settings.name)  # type: ignore[arg-type]  # checked above
    groups = parameter_groups(chunks, chosen.weight_decay)
    if chosen.name == "sgd":
        return torch.optim.SGD(groups, lr=chosen.lr, momentum=chosen.momentum)
    kind: Any = torch.optim.AdamW
    if chosen.name == "adamw_8bit":
        kind = import_bitsandbytes("optim").AdamW8bit
    made: torch.optim.Optimizer = kind(groups, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps)
    return made


def lora_config(adapter: Adapter) -> Any:
    """The config of ``peft`` for ``adapter``."""
    from peft import LoraConfig

    return LoraConfig(
        r=adapter.rank,
        lora_alpha=round(adapter.scaling * adapter.rank),
        lora_dropout=adapter.dropout,
        target_modules=adapter.targets,
    )
