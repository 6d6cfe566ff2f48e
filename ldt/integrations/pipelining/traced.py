"""Chunks from a model that ``torch.distributed.pipelining.pipeline`` has traced and split."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import Pipe

from ldt._C import METADATA_NAMES
from ldt.integrations.pipelining.wiring import Value, Wiring, wirings_of
from ldt.runtime.common.kept import keep
from ldt.topology import Topology

__all__ = ["TracedChunk", "from_pipe"]


class TracedChunk(nn.Module):
    """A stage of a traced model, which also passes on or keeps what only later stages need.

    ``stage`` is the module that torch made; its parameters have their names in the whole model.
    """

    def __init__(self, stage: nn.Module, wiring: Wiring) -> None:
        super().__init__()
        self.stage = stage
        self._wiring = wiring

    def forward(self, *given: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """Take the tensors of the hop and those kept for it, then the model's inputs in order or by name."""
        wiring = self._wiring
        hop, positional = given[: len(wiring.takes)], given[len(wiring.takes) :]
        named = dict(zip(wiring.inputs, positional, strict=False)) | inputs
        values: dict[Value, Any] = dict(zip(wiring.takes, hop, strict=True))
        values |= {(name, None): value for name, value in named.items()}
        values |= {value: compute() for value, compute in wiring.constants.items()}
        made = self.stage(*(values[value] for value in wiring.needs))
        single = len(wiring.makes) == 1 and wiring.makes[0][1] is None
        values |= dict(zip(wiring.makes, [made] if single else made, strict=True))
        kept = [keep(values[value]) for value in wiring.keeps]
        passed = (*(values[value] for value in wiring.sends), *kept)
        return passed[0] if len(passed) == 1 and not kept else passed

    def whole_model_name(self, name: str) -> str:
        """The name of a tensor of ``state_dict`` in the whole model, which checkpoints use."""
        return name.removeprefix("stage.")


def from_pipe(pipe: Pipe, topology: Topology, model: nn.Module | None = None) -> list[TracedChunk]:
    """Return the chunks of ``pipe``, in model order, for ``topology``. Each rank keeps those of its own stage.

    A value that a later stage needs is passed on by the chunks between, unless its node has had it: then it is kept
    there (``ldt.keep``) and does not cross. What depends on no input and no weight is computed where it is needed.
    Inputs of the model are taken on the edge, and by the cloud only if they are metadata, such as ``attention_mask``.

    Args:
        pipe: What ``torch.distributed.pipelining.pipeline`` returned for as many stages as ``topology`` has chunks. It
            may have been traced on the meta device; ``to_empty`` of two chunks then gives each a parameter of its own,
            so tie those of one stage again.
        topology: The topology.
        model: The model that was traced. With it parameters that have several names in it are one again, which
            ``pipeline`` has copied for each stage.

    Raises:
        ValueError: The number of stages is not that of the chunks; stages on different nodes share a parameter; or a
            stage on the cloud needs an input of the model that is no metadata.
    """
    if pipe.num_stages != topology.num_chunks:
        raise ValueError(
            f"the model was split into {pipe.num_stages} stages, but {topology.to_text()} has {topology.num_chunks} "
            "chunks: trace it with a split_spec for as many"
        )
    stages: list[Any] = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
    wirings = wirings_of(pipe.split_gm, stages, topology)
    for index, wiring in enumerate(wirings):
        if topology.stage_of(index) != 0:
            _check_inputs(index, wiring.inputs)
    _share_parameters(stages, topology, model)
    return [_chunk(stage, wiring) for stage, wiring in zip(stages, wirings, strict=True)]


def _check_inputs(index: int, inputs: Sequence[str]) -> None:
    others = [name for name in inputs if name not in METADATA_NAMES]
    if others:
        raise ValueError(
            f"stage {index} runs on the cloud and needs the model's inputs {', '.join(others)}, which stay on the "
            "edge: compute what it needs of them in stage 0"
        )


def _share_parameters(stages: Sequence[nn.Module], topology: Topology, model: nn.Module | None) -> None:
    """Make the copies of a parameter one again. Raises ValueError if they are on different nodes."""
    names: dict[str, str] = {}  # of each parameter, the first of its names
    first: dict[int, str] = {}
    for name, parameter in () if model is None else model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    found: dict[str, tuple[int, nn.Parameter]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in list(stage.named_parameters(remove_duplicate=False)):
            other, shared = found.setdefault(names.get(name, name), (index, parameter))
            if topology.stage_of(other) != topology.stage_of(index):
                raise ValueError(
                    f"stages {other} and {index} share the parameter {name}, but run on different nodes: split the "
                    "model so that all its uses are on one"
                )
            owner, _, attribute = name.rpartition(".")
            stage.get_submodule(owner)._parameters[attribute] = shared


def _chunk(stage: nn.Module, wiring: Wiring) -> TracedChunk:
    """A chunk whose forward declares its arguments, by which a pipeline finds what it takes by name."""
    hop = [
        inspect.Parameter(f"hop_{index}", inspect.Parameter.POSITIONAL_ONLY)
        for index in range(len(wiring.takes))
    ]
    kind = inspect.Parameter.KEYWORD_ONLY if hop else inspect.Parameter.POSITIONAL_OR_KEYWORD
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    inputs = [inspect.Parameter(name, kind) for name in wiring.inputs]

    def forward(self: TracedChunk, *given: torch.Tensor, **named: torch.Tensor) -> Any:
        return TracedChunk.forward(self, *given, **named)

    forward.__signature__ = inspect.Signature([itself, *hop, *inputs])  # type: ignore[attr-defined]
    made: TracedChunk = type("TracedChunk", (TracedChunk,), {"forward": forward})(stage, wiring)
    return made
