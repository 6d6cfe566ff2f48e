"""Digests by which ranks of different sites find that their folders have different models."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ldt.integrations.hf.checkpoint import files_of_tensors, opened

__all__ = ["digest_of_config", "digest_of_weights"]

# What does not change what a chunk computes, or differs with the version of transformers that saved it.
_IGNORED = {"transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}


def digest_of_config(config: PreTrainedConfig) -> str:
    """The digest of what the model's structure depends on."""
    return _digest(json.dumps(_relevant(config.to_dict()), sort_keys=True, default=str).encode())


def digest_of_weights(path: str | os.PathLike[str]) -> str | None:
    """The digest of the final norm in a folder; None for the name of a hub, whose files would have to be downloaded."""
    if not Path(path).is_dir():
        return None
    stored = files_of_tensors(path)
    norms = [name for name in stored if name.endswith("norm.weight") and "layers" not in name]
    if not norms:
        return None
    with opened(path, stored[min(norms)]) as file:
        tensor: torch.Tensor = file.get_tensor(min(norms))
    return _digest(min(norms).encode() + tensor.flatten().view(torch.uint8).numpy().tobytes())


def _relevant(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: _relevant(item)
        for key, item in value.items()
        if key not in _IGNORED and not str(key).startswith("_")
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
