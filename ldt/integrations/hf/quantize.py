"""Keeps the linear layers of chunks in 4 bits, for training adapters beside them (QLoRA)."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ldt.integrations.hf.chunks import Chunk

__all__ = ["import_bitsandbytes", "quantize"]


def import_bitsandbytes(part: str) -> Any:
    """Import a part of bitsandbytes. Raises ImportError that says how to install it."""
    try:
        return importlib.import_module(f"bitsandbytes.{part}")
    except ImportError as error:
        raise ImportError(
            f"four_bit and adamw_8bit need bitsandbytes on this rank ({error}): pip install bitsandbytes"
        ) from error


def quantize(chunks: Iterable[Chunk], device: torch.device) -> None:
    """Replace linear layers, apart from the head, by those of bitsandbytes in 4 bits (NF4), and move all to ``device``.

    Call it after loading weights and before adding adapters. Layers compute in the dtype that their weights had.
    Raises ImportError without bitsandbytes, and what it raises for a device that it does not support.
    """
    bnb = import_bitsandbytes("nn")
    for chunk in chunks:
        head = chunk.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        for name, part in list(chunk.model.named_modules()):
            if type(part) is not nn.Linear or part is head:
                continue
            dtype = part.weight.dtype
            made: Any = bnb.Linear4bit(
                part.in_features,
                part.out_features,
                bias=part.bias is not None,
                compute_dtype=dtype,
                quant_type="nf4",
                device="meta",
            )
            weight = bnb.Params4bit(part.weight.detach(), requires_grad=False, quant_type="nf4", module=made)
            made.weight = weight.to(device)  # which quantizes it
            made.bias = part.bias
            owner, _, attribute = name.rpartition(".")
            setattr(chunk.model.get_submodule(owner), attribute, made)
        chunk.to(device)
