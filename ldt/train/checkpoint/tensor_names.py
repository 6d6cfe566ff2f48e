"""Maps the tensors of a pipeline's chunks to names in the whole model, by which another split finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ldt.errors import LdtError
from ldt.runtime.common.redact import InputTypeError, InputValueError
from ldt.runtime.model.module_state import HasWholeModelNames, unwrapped_name
from ldt.runtime.pipeline import Pipeline

__all__ = ["NamedTensors", "Names", "model_key", "named_tensors"]

Names = Callable[[int, str], str]


def model_key(name: str) -> str:
    """The key of a parameter or buffer among a stage's tensors."""
    return f"model.{name}"


class NamedTensors(NamedTuple):
    """``tensors`` has each tensor once, by its first name in model order; ``aliases`` maps other names to the first."""

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]

    def by_identity(self) -> dict[int, str]:
        """The names of the tensors by their ``id``."""
        return {id(tensor): name for name, tensor in self.tensors.items()}

    def names_of(self, name: str) -> list[str]:
        """The first ``name`` of a tensor and its aliases."""
        return [name, *(alias for alias, first in self.aliases.items() if first == name)]


def named_tensors(pipeline: Pipeline, names: Names | None = None) -> NamedTensors:
    """The parameters and persistent buffers of this rank's chunks.

    Their names come from ``names(chunk index, name in the chunk)``, else from the chunk itself, else they are
    "chunk.<index>.<name>". Those of the loss function are "loss.<name>".
    Raises LdtError for two tensors with one name, for a tensor without memory, and for state that is not a tensor.
    """
    found = NamedTensors({}, {})
    firsts: dict[int, str] = {}
    indices = pipeline.mesh.topology.chunks_of(pipeline.mesh.stage)
    holders = [
        (index, chunk, names or _own_names(chunk))
        for index, chunk in zip(indices, pipeline.chunks, strict=True)
    ]
    if pipeline.loss_module is not None:
        holders.append((pipeline.mesh.topology.tail, pipeline.loss_module, _name_in_loss))
    for index, chunk, name_of in holders:
        for name, value in chunk.state_dict(keep_vars=True).items():
            whole = name_of(index, unwrapped_name(name))
            _check(whole, value, index, name)
            if firsts.setdefault(id(value), whole) != whole:
                found.aliases[whole] = firsts[id(value)]
            elif found.tensors.setdefault(whole, value) is not value:
                raise LdtError(
                    f"two tensors of this rank would be saved as {whole}, one of them {name} of chunk {index}: "
                    "give names=, a function of chunk index and name"
                )
    return found


def _own_names(chunk: torch.nn.Module) -> Names:
    if isinstance(chunk, HasWholeModelNames):
        return lambda _, name: chunk.whole_model_name(name)
    return "chunk.{}.{}".format


def _name_in_loss(_: int, name: str) -> str:
    return f"loss.{name}"


def _check(whole: object, value: object, index: int, name: str) -> None:
    if not isinstance(whole, str):
        raise InputTypeError(f"names({index}, {name!r}) must give a str, got {type(whole).__name__}")
    if not isinstance(value, torch.Tensor):
        raise LdtError(
            f"{name} of chunk {index} is extra state of a module, a {type(value).__name__}: a checkpoint saves only "
            "tensors, so keep it in a buffer"
        )
    if value.is_meta:
        raise InputValueError(
            f"{name} of chunk {index} is on the meta device: give it memory, as chunk.to_empty(device=...) does"
        )
