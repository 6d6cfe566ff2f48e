"""The parameter groups of an optimizer, as the Trainer of transformers makes them for the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from ldt.integrations.hf.chunks import Chunk

__all__ = ["parameter_groups"]

# Those of transformers.Trainer.get_decay_parameter_names, which needs accelerate.
_NO_DECAY = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def parameter_groups(chunks: Iterable[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups of ``chunks``: with ``weight_decay``, and without for biases and norms.

    Each parameter that requires a gradient comes once, in the group that ``transformers.Trainer`` puts it in. Both
    groups exist on every rank, perhaps empty, so learning rates of the edge fit those of the cloud.
    """
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    seen: set[int] = set()
    for chunk in chunks:
        model = chunk.model if isinstance(chunk, Chunk) else chunk
        decayed = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                groups[name not in decayed]["params"].append(parameter)
    return groups
