"""Finds which values of a split model each chunk gets, makes, sends on and keeps for a later chunk of its node."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx

from ldt.runtime.common.kept import earlier_chunk
from ldt.topology import Topology

__all__ = ["Value", "Wiring", "wirings_of"]

Value = tuple[str, int | None]  # what computes it, and which of its outputs; None if it has one


@dataclass
class Wiring:
    """The values of a chunk.

    Attributes:
        needs: What its stage is called with.
        makes: What its stage returns.
        inputs: Of the model, by name.
        takes: What arrives: over the hop, then what an earlier chunk of the node kept.
        sends: What the next chunk gets; of the last chunk what the model returns.
        keeps: What the next chunk of the node gets.
        constants: What it computes itself, as it depends on nothing.
    """

    needs: list[Value]
    makes: list[Value]
    inputs: list[str]
    takes: list[Value] = field(default_factory=list)
    sends: list[Value] = field(default_factory=list)
    keeps: list[Value] = field(default_factory=list)
    constants: dict[Value, fx.GraphModule] = field(default_factory=dict)


def wirings_of(graph: fx.GraphModule, stages: Sequence[fx.GraphModule], topology: Topology) -> list[Wiring]:
    """Return the wiring of each chunk. Raises ValueError if something is computed between stages."""
    values: dict[fx.Node, Value] = {}
    calls: list[fx.Node] = []
    inputs: set[Value] = set()
    outputs: list[Value] = []
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
            outputs = [values[one] for one in (result if isinstance(result, (tuple, list)) else [result])]
        else:
            raise ValueError(
                f"the split model computes {node.format_node()} between its stages: split it elsewhere"
            )
    wirings = []
    for call, stage in zip(calls, stages, strict=True):
        needs = [values[argument] for argument in call.args]  # type: ignore[index]  # nodes alone
        taken = [name for name, index in needs if (name, index) in inputs]
        wirings.append(Wiring(needs, list(_made(call, stage)), list(dict.fromkeys(taken))))
    _route(wirings, outputs, topology, dict(_constants(calls, stages)))
    for index, wiring in enumerate(wirings):
        earlier = earlier_chunk(topology, index)
        arriving = wirings[index - 1].sends if index else []
        wiring.takes = arriving + ([] if earlier is None else wirings[earlier].keeps)
    wirings[-1].sends = outputs
    return wirings


def _route(
    wirings: Sequence[Wiring],
    outputs: Sequence[Value],
    topology: Topology,
    constants: Mapping[Value, fx.GraphModule],
) -> None:
    """Decide how each value comes to the chunks that need it: kept by their node if that has it, else over hops."""
    tail = len(wirings) - 1
    makers = {value: index for index, wiring in enumerate(wirings) for value in wiring.makes}
    for value, maker in makers.items():
        users = [index for index, wiring in enumerate(wirings) if value in wiring.needs]
        having = {maker}
        for user in sorted({*users, *([tail] if value in outputs else [])} - {maker}):
            if value in constants:
                wirings[user].constants[value] = constants[value]
                continue
            for chunk, following in list(_path(user, having, topology)):
                (wirings[chunk].sends if following == chunk + 1 else wirings[chunk].keeps).append(value)
                having.add(following)


def _path(user: int, having: set[int], topology: Topology) -> Iterator[tuple[int, int]]:
    """The steps that bring a value to ``user`` from chunks that have it."""
    stage = topology.stage_of(user)
    local = [chunk for chunk in having if chunk < user and topology.stage_of(chunk) == stage]
    if user in having:
        return
    if local:
        chunks = [chunk for chunk in topology.chunks_of(stage) if max(local) <= chunk <= user]
        yield from pairwise(chunks)
        return
    for chunk in range(max(chunk for chunk in having if chunk < user), user):
        yield chunk, chunk + 1


def _made(call: fx.Node, stage: fx.GraphModule) -> Iterator[Value]:
    returned = _returned(stage)
    if isinstance(returned, (tuple, list)):
        yield from ((call.name, index) for index in range(len(returned)))
    else:
        yield call.name, None


def _constants(
    calls: Sequence[fx.Node], stages: Sequence[fx.GraphModule]
) -> Iterator[tuple[Value, fx.GraphModule]]:
    """The values that depend on no input and no weight, and what computes each."""
    for call, stage in zip(calls, stages, strict=True):
        returned = _returned(stage)
        for value, node in zip(
            _made(call, stage), returned if isinstance(returned, (tuple, list)) else [returned], strict=True
        ):
            if isinstance(node, fx.Node) and all(one.op == "call_function" for one in _ancestors(node)):
                yield value, _alone(node)


def _ancestors(node: fx.Node) -> dict[fx.Node, None]:
    """What ``node`` depends on, and itself, in the order of its graph."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += one.all_input_nodes
    return {one: None for one in node.graph.nodes if one in found}


def _alone(node: fx.Node) -> fx.GraphModule:
    """A module that computes ``node`` alone."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for one in _ancestors(node):
        copies[one] = graph.node_copy(one, copies.__getitem__)
    graph.output(copies[node])
    return fx.GraphModule({}, graph)


def _returned(stage: fx.GraphModule) -> object:
    output = next(node for node in stage.graph.nodes if node.op == "output")
    return output.args[0]
