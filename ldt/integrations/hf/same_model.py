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

__all__ = ["differ", "digest_of_config", "digest_of_weights"]

# What does not change what a chunk computes, or differs with the version of transformers that saved it.
_IGNORED = {"transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}

_SAMPLED = 64  # tensors
_EACH = 8  # characters for a name, and for its values


def digest_of_config(config: PreTrainedConfig) -> str:
    """The digest of what the model's structure depends on."""
    return _digest(json.dumps(_relevant(config.to_dict()), sort_keys=True, default=str).encode())


def digest_of_weights(path: str | os.PathLike[str]) -> str | None:
    """Digests of the final norm in a folder and of the first rows of some layers' weights, by their names.

    None for the name of a hub, whose files would have to be downloaded.
    """
    if not Path(path).is_dir():
        return None
    found = {}
    for name, file in files_of_tensors(path).items():
        layer = any(part.isdecimal() for part in name.split("."))
        is_compared = name.endswith("norm.weight") or (layer and name.endswith("weight"))
        if is_compared and (Path(path) / file).is_file():
            found[_digest(name.encode())[:_EACH]] = (layer, name, file)
    # The same on all ranks that have them.
    kept = sorted(found, key=lambda key: (found[key][0], key))[:_SAMPLED]
    return " ".join(key + _digest_of_row(path, *found[key][1:]) for key in kept) or None


def differ(one: str, other: str) -> bool:
    """Whether two digests of weights have a tensor in common that differs."""
    tensors = [{part[:_EACH]: part[_EACH:] for part in digest.split()} for digest in (one, other)]
    return any(tensors[0][key] != tensors[1][key] for key in tensors[0].keys() & tensors[1].keys())


def _digest_of_row(path: str | os.PathLike[str], name: str, file: str) -> str:
    with opened(path, file) as content:
        tensor = content.get_slice(name)
        row: torch.Tensor = tensor[:1] if len(tensor.get_shape()) > 1 else content.get_tensor(name)
    return _digest(row.flatten().view(torch.uint8).numpy().tobytes())[:_EACH]


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
