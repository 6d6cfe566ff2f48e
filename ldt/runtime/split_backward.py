"""The backward of one graph in two parts: first the gradients of its inputs, later those of its parameters.

The idea is that of zero-bubble schedules (Qi et al., 2023, "Zero Bubble Pipeline Parallelism"): the neighbour waits for
the gradients of the inputs alone. Nodes between the roots and the inputs run in the first part. Those of them on which
parameters depend are the *branches*: what flows into them is kept, and the second part starts there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ldt.errors import LdtError

__all__ = ["Start", "WeightPart", "backward_input"]

Start = tuple[torch.Tensor | GradientEdge, torch.Tensor]  # where a backward starts, and with which gradient
# Nodes, by the beginning of their names, whose backward is one piece that does not run under autograd.grad.
_WHOLE = {
    "CompiledFunction": "a compiled function",
    "CheckpointFunction": "torch.utils.checkpoint with use_reentrant=True",
}
_Grads = tuple[torch.Tensor | None, ...]  # what flows into a node, one for each of its outputs


def backward_input(
    starts: Sequence[Start], inputs: Sequence[GradientEdge]
) -> tuple[list[torch.Tensor | None], WeightPart]:
    """The gradients of ``inputs`` (None: not used), and what is left to do for the parameters.

    Raises LdtError if the graph holds a node that computes both at once and cannot run twice.
    """
    roots = [
        (root if isinstance(root, GradientEdge) else get_gradient_edge(root), grad) for root, grad in starts
    ]
    graph = _Graph(roots, inputs)
    flows: dict[Node, _Grads] = {}
    with ExitStack() as hooks:
        for branch in graph.branches:
            hooks.enter_context(branch.register_prehook(partial(flows.__setitem__, branch)))
        through = [(root, grad) for root, grad in roots if root.node in graph.between]
        grads: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if through:
            edges: Any = [root for root, _ in through]  # torch's annotation knows of tensors alone
            grads = torch.autograd.grad(
                edges, inputs, [grad for _, grad in through], retain_graph=True, allow_unused=True
            )
    beside = [(root, grad) for root, grad in roots if root.node not in graph.between]
    return list(grads), WeightPart(graph, flows, beside)


class WeightPart:
    """What is left of a backward: it accumulates into the parameters' ``grad``. Holds the graph until it is run."""

    def __init__(
        self, graph: _Graph, flows: dict[Node, _Grads], beside: Sequence[tuple[GradientEdge, torch.Tensor]]
    ):
        self._flows = flows
        self._beside = list(beside)
        self._groups = graph.groups([root.node for root, _ in beside])

    def run(self) -> None:
        """Once. Bit-equal to an unsplit backward: each parameter gets one sum, added up in the same order."""
        for sources, leaves in self._groups:
            starts = [(root, grad) for root, grad in self._beside if root.node in sources]
            for node in sources & self._flows.keys():
                flow = enumerate(self._flows[node])
                starts += [(GradientEdge(node, index), grad) for index, grad in flow if grad is not None]
            if starts:
                self._accumulate(starts, sources, leaves)
        self._groups.clear()
        self._beside.clear()
        self._flows.clear()

    def _accumulate(
        self, starts: Sequence[tuple[GradientEdge, torch.Tensor]], sources: set[Node], leaves: set[Node]
    ) -> None:
        with ExitStack() as hooks:
            for node in sources & self._flows.keys():
                # One source may lie behind another, and a tensor's own hooks run again: what was kept is right.
                hooks.enter_context(node.register_prehook(partial(_instead, self._flows[node])))
            edges: Any = [edge for edge, _ in starts]
            targets: Any = [GradientEdge(leaf, 0) for leaf in leaves]
            torch.autograd.backward(edges, [grad for _, grad in starts], retain_graph=True, inputs=targets)


def _instead(kept: _Grads, _: _Grads) -> _Grads:
    return kept


class _Graph:
    """The nodes between roots and inputs, and for each branch among them the leaves that hang on it alone."""

    def __init__(
        self, roots: Sequence[tuple[GradientEdge, torch.Tensor]], inputs: Sequence[GradientEdge]
    ) -> None:
        self._ends = {edge.node for edge in inputs}
        users: dict[Node, list[Node]] = {}
        for node in _reachable((root.node for root, _ in roots), self._ends):
            for name, what in _WHOLE.items():
                if node.name().startswith(name):
                    raise LdtError(
                        f"its backward cannot be split: {what} computes the gradients of inputs and parameters in "
                        "one go. Change that, or take a plan without split backward"
                    )
            for child in _children(node):
                users.setdefault(child, []).append(node)
        self.between = set(_reached(self._ends, lambda node: users.get(node, ())))
        self.branches = {
            node: leaves for node in self.between - self._ends if (leaves := self._leaves_beside(node))
        }

    def groups(self, beside: Iterable[Node]) -> list[tuple[set[Node], set[Node]]]:
        """Sources and the leaves they lead to, those that share a leaf together. ``beside``: roots off the way."""
        merged: list[tuple[set[Node], set[Node]]] = []
        sources = {**self.branches, **{node: set(_leaves([node])) for node in beside}}
        for node, leaves in sources.items():
            group, own = {node}, set(leaves)
            apart = []
            for other in merged:
                if other[1].isdisjoint(own):
                    apart.append(other)
                else:
                    group |= other[0]
                    own |= other[1]
            merged = [*apart, (group, own)]
        return merged

    def _leaves_beside(self, node: Node) -> set[Node]:
        return set(_leaves(child for child in _children(node) if child not in self.between))


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _leaves(nodes: Iterable[Node]) -> Iterator[Node]:
    return (node for node in _reachable(nodes, set()) if node.name().endswith("AccumulateGrad"))


def _reachable(starts: Iterable[Node], ends: set[Node]) -> Iterator[Node]:
    """What backward comes through from ``starts``, not going on beyond ``ends``."""
    return _reached(starts, lambda node: () if node in ends else _children(node))


def _reached(starts: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    stack = list(dict.fromkeys(starts))
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        fresh = [neighbour for neighbour in dict.fromkeys(neighbours(node)) if neighbour not in seen]
        seen.update(fresh)
        stack += fresh
