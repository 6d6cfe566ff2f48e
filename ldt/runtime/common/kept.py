"""Tensors that a chunk keeps for the next chunk of its node: how it marks them, and who takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ldt.errors import LdtError
from ldt.runtime.common.redact import InputTypeError
from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec
from ldt.topology import Topology

__all__ = [
    "Kept",
    "check_taken",
    "earlier_chunk",
    "input_specs",
    "keep",
    "kept_specs",
    "mark_kept",
    "sent_specs",
]


class Kept(NamedTuple):
    """Marks a tensor that stays on the node. In the result of an ``output_spec`` it marks a TensorSpec."""

    tensor: Any


def keep(tensor: torch.Tensor | TensorSpec) -> Kept:
    """Mark an output of a chunk as kept: it is not sent, but given to the next chunk of the same node.

    That chunk gets it as a positional input, after the tensors of its hop and in the order in which they were returned.
    Its gradient goes to the backward of the chunk that kept it. What a still later chunk needs is kept again. An
    ``output_spec`` marks a TensorSpec in the same way.

    Args:
        tensor: An output of the chunk.

    Returns:
        A named tuple with the field ``tensor``, which the chunk returns in place of the tensor.

    Raises:
        TypeError: It is no tensor.
    """
    if not isinstance(tensor, (torch.Tensor, TensorSpec)):
        raise InputTypeError(f"ldt.keep() takes a tensor that the chunk returns, got {type(tensor).__name__}")
    return Kept(tensor)


def mark_kept(specs: HopSpecs, num_kept: int) -> HopSpecs:
    """Return the specs with the last ``num_kept`` marked."""
    sent = len(specs) - num_kept
    return (*specs[:sent], *(replace(spec, kept=True) for spec in specs[sent:])) if num_kept else specs


def sent_specs(specs: HopSpecs) -> HopSpecs:
    """Return those of a chunk's outputs that the next chunk gets."""
    return tuple(spec for spec in specs if not spec.kept)


def kept_specs(specs: HopSpecs) -> HopSpecs:
    """Return those of a chunk's outputs that stay on its node."""
    return tuple(spec for spec in specs if spec.kept)


def earlier_chunk(topology: Topology, chunk: int) -> int | None:
    """Return the chunk before ``chunk`` on its node, None if it is the first."""
    before = topology.placement[:chunk]
    return next((c for c in reversed(range(chunk)) if before[c] == topology.placement[chunk]), None)


def input_specs(topology: Topology, outputs: Callable[[int], HopSpecs], chunk: int) -> HopSpecs:
    """Return what ``chunk`` takes: the tensors of its hop, then those kept for it. ``outputs`` are those of a chunk."""
    earlier = earlier_chunk(topology, chunk)
    kept = () if earlier is None else kept_specs(outputs(earlier))
    return (*sent_specs(outputs(chunk - 1)), *kept)


def check_taken(topology: Topology, chunk: int) -> None:
    """Raise LdtError if no later chunk of its node takes what ``chunk`` keeps."""
    stage = topology.stage_of(chunk)
    if chunk == topology.chunks_of(stage)[-1]:
        raise LdtError(
            f"chunk {chunk} keeps a tensor (ldt.keep), but stage {stage} has no later chunk to take it: return the "
            "tensor itself, which the next chunk gets, or leave it out"
        )
