"""Chunks from a model that ``torch.distributed.pipelining.pipeline`` has traced and split."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import Pipe

from ldt._C import METADATA_NAMES
from ldt.topology import Topology

__all__ = ["TracedChunk", "from_pipe"]

Value = tuple[str, int | None]  # what computes it, and which of its outputs; None if it has one


class TracedChunk(nn.Module):
    """A stage of a traced model, which also passes on what only later stages need.

    ``stage`` is the module that torch made; its parameters have their names in the whole model.
    """

    def __init__(self, stage: nn.Module, wiring: _Wiring) -> None:
        super().__init__()
        self.stage = stage
        self._wiring = wiring

    def forward(self, *given: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """Take the tensors of the hop, then the model's inputs in order or by name."""
        wiring = self._wiring
        hop, positional = given[: len(wiring.takes)], given[len(wiring.takes) :]
        named = dict(zip(wiring.inputs, positional, strict=False)) | inputs
        values: dict[Value, Any] = dict(zip(wiring.takes, hop, strict=True))
        values |= {(name, None): value for name, value in named.items()}
        made = self.stage(*(values[value] for value in wiring.needs))
        single = len(wiring.makes) == 1 and wiring.makes[0][1] is None
        values |= dict(zip(wiring.makes, [made] if single else made, strict=True))
        passed = tuple(values[value] for value in wiring.gives)
        return passed[0] if len(passed) == 1 else passed

    def whole_model_name(self, name: str) -> str:
        """The name of a tensor of ``state_dict`` in the whole model, which checkpoints use."""
        return name.removeprefix("stage.")


@dataclass
class _Wiring:
    """Which values a stage is called with and makes, and which its chunk takes from and gives to its neighbours."""

    needs: list[Value]
    makes: list[Value]
    inputs: list[str]  # of the model, by name
    takes: list[Value]
    gives: list[Value]


def from_pipe(pipe: Pipe, topology: Topology, model: nn.Module | None = None) -> list[TracedChunk]:
    """Return the chunks of ``pipe``, in model order, for ``topology``. Each rank keeps those of its own stage.

    A value that a later stage needs is relayed by the chunks between. Inputs of the model are taken on the edge, and by
    the cloud only if they are metadata, such as ``attention_mask``.

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
    wirings = _wirings(pipe.split_gm, stages)
    for index, wiring in enumerate(wirings):
        if topology.stage_of(index) != 0:
            _check_inputs(index, wiring.inputs)
    _share_parameters(stages, topology, model)
    return [_chunk(stage, wiring) for stage, wiring in zip(stages, wirings, strict=True)]


def _wirings(graph: fx.GraphModule, stages: Sequence[fx.GraphModule]) -> list[_Wiring]:
    values: dict[fx.Node, Value] = {}
    inputs: set[Value] = set()
    calls: list[fx.Node] = []
    result: Any = None
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = (node.name, None)
            inputs.add(values[node])
        elif node.op == "call_module":
            values[node] = (node.name, None)
            calls.append(node)
        elif node.op == "call_function" and node.target is operator.getitem:
            values[node] = (values[node.args[0]][0], node.args[1])
        elif node.op == "output":
            result = node.args[0]
        else:
            raise ValueError(
                f"the split model computes {node.format_node()} between its stages: split it elsewhere"
            )
    outputs = [values[node] for node in (result if isinstance(result, (tuple, list)) else [result])]
    wirings = []
    for call, stage in zip(calls, stages, strict=True):
        needs = [values[argument] for argument in call.args]  # type: ignore[index]  # nodes alone
        taken = [name for name, index in needs if (name, index) in inputs]
        wirings.append(_Wiring(needs, _made(call, stage), list(dict.fromkeys(taken)), [], []))
    live = [value for value in dict.fromkeys(outputs) if value not in inputs]
    for wiring in reversed(wirings):  # what is needed behind a chunk, it gives
        wiring.gives = live if wiring is not wirings[-1] else outputs
        before = [value for value in live if value not in wiring.makes]
        live = [value for value in dict.fromkeys([*before, *wiring.needs]) if value not in inputs]
        wiring.takes = live
    return wirings


def _made(call: fx.Node, stage: fx.GraphModule) -> list[Value]:
    (returned,) = next(node for node in stage.graph.nodes if node.op == "output").args
    if isinstance(returned, (tuple, list)):
        return [(call.name, index) for index in range(len(returned))]
    return [(call.name, None)]


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


def _chunk(stage: nn.Module, wiring: _Wiring) -> TracedChunk:
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
