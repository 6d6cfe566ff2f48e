"""Splits the backward of a graph in two parts: first the gradients of its inputs, later those of its parameters.

The idea comes from zero-bubble schedules (Qi et al., 2023, "Zero Bubble Pipeline Parallelism"): the neighbour waits
only for the gradients of the inputs. The first part runs the nodes between the roots and the inputs. *Branches* are
those of them that lead to parameters as well. The gradients that flow into them are kept, and the second part starts
there.

Branches run twice, and so do their tensors' hooks and the side effects of custom functions; what a hook returns the
second time is ignored. A custom function that changes gradients of its parameters itself runs once. Functions and hooks
that change other parameters, gradients or buffers are refused (``ldt.runtime.execution.side_effects``); other side
effects happen twice, including ``retain_grad``. The graph lives until the second part has run. The engine visits all
nodes behind each branch when it starts there, which makes long chunks of small layers slow (0.02 s for 100 layers on a
CPU).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ldt._torch_private import recompute_once
from ldt.errors import LdtError
from ldt.runtime.common.autograd_graph import (
    REENTRANT_CHECKPOINT,
    accumulate_grad_nodes,
    children,
    depth_first,
    name_of,
    reachable,
)
from ldt.runtime.execution.side_effects import FunctionWatch, SecondPart

__all__ = ["Start", "WeightPart", "backward_input"]

Start = tuple[torch.Tensor | GradientEdge, torch.Tensor]  # a root of a backward, and its gradient
# Nodes, by prefix of their names, whose backward cannot run in parts under autograd.grad.
_UNSPLITTABLE = {
    "CompiledFunction": "a compiled function",
    "RegisterPostBackwardFunction": "fully_shard",
    REENTRANT_CHECKPOINT: "torch.utils.checkpoint with use_reentrant=True",
}
_Grads = tuple[torch.Tensor | None, ...]  # the gradients that flow into a node, one per output


def backward_input(
    starts: Sequence[Start], inputs: Sequence[GradientEdge], watch: FunctionWatch | None = None
) -> tuple[list[torch.Tensor | None], WeightPart]:
    """Return the gradients of ``inputs`` (None if not used) and the remaining work for the parameters.

    Raises LdtError if a node computes both at once and cannot run twice, or if ``watch`` sees a side effect: custom
    functions that accumulate gradients of their parameters themselves run in the first part only, others must change
    nothing.
    """
    roots = [
        (root if isinstance(root, GradientEdge) else get_gradient_edge(root), grad) for root, grad in starts
    ]
    cut = _Cut(roots, inputs)
    flows: dict[Node, _Grads] = {}
    custom = [node for node in cut.branches if isinstance(node, BackwardCFunction)]
    watched = watch.begin(bool(custom)) if watch is not None else None
    with ExitStack() as hooks:
        for branch in cut.branches:
            hooks.enter_context(branch.register_prehook(partial(flows.__setitem__, branch)))
        if watched is not None:
            for node in custom:
                watched.watch_node(node, cut.branches[node], cut.between, hooks)
        through = [(root, grad) for root, grad in roots if root.node in cut.between]
        grads: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if through:
            edges: Any = [root for root, _ in through]  # torch's annotation allows only tensors
            grads = torch.autograd.grad(
                edges, inputs, [grad for _, grad in through], retain_graph=True, allow_unused=True
            )
    second = nullcontext if watched is None else watched.check([name_of(node) for node in custom])
    weight_roots = [(root, grad) for root, grad in roots if root.node not in cut.between]
    groups = cut.groups([root.node for root, _ in weight_roots])
    return list(grads), WeightPart(
        groups, flows, weight_roots, {} if watched is None else watched.kept, second
    )


class WeightPart:
    """The second part of a backward: accumulates into the parameters' ``grad``. Holds the graph until it has run."""

    def __init__(
        self,
        groups: Sequence[_Group],
        flows: dict[Node, _Grads],
        weight_roots: Sequence[tuple[GradientEdge, torch.Tensor]],
        kept: dict[Node, list[tuple[GradientEdge, torch.Tensor]]],
        around: SecondPart,
    ) -> None:
        self._groups = list(groups)
        self._flows = flows
        self._weight_roots = list(weight_roots)
        self._kept = kept  # results of the nodes that do not run again
        self._around = around

    def run(self) -> None:
        """Run it, once. Bit-equal to an unsplit backward: each parameter gets one sum, in the same order."""
        alone = [group for group in self._groups if len(group.sources) == 1]
        shared = [group for group in self._groups if len(group.sources) > 1]
        with self._around():
            with recompute_once():  # only for backwards that have no node in common
                for group in alone:
                    self._accumulate(group)
            for group in shared:
                self._accumulate(group)
        self._groups.clear()
        self._weight_roots.clear()
        self._flows.clear()
        self._kept.clear()

    def _accumulate(self, group: _Group) -> None:
        nodes = [node for node in self._flows if node in group.sources and node not in self._kept]
        starts = [(root, grad) for root, grad in self._weight_roots if root.node in group.sources]
        for node in nodes:
            flow = enumerate(self._flows[node])
            starts += [(GradientEdge(node, index), grad) for index, grad in flow if grad is not None]
        starts += [start for node in self._kept if node in group.sources for start in self._kept[node]]
        if not starts:
            return
        with ExitStack() as hooks:
            for node in nodes:
                # One source may lie behind another, and tensor hooks run again: use the kept gradients instead.
                hooks.enter_context(node.register_prehook(partial(_replace_with, self._flows[node])))
            edges: Any = [edge for edge, _ in starts]
            targets: Any = [GradientEdge(leaf, 0) for leaf in group.leaves]
            torch.autograd.backward(edges, [grad for _, grad in starts], retain_graph=True, inputs=targets)


def _replace_with(kept: _Grads, _: _Grads) -> _Grads:
    return kept


class _Group(NamedTuple):
    """The nodes that a backward for some parameters starts from, and the leaf nodes of those parameters."""

    sources: set[Node]
    leaves: set[Node]


class _Cut:
    """The nodes between roots and inputs, and for each branch the leaves that it reaches outside them."""

    def __init__(
        self, roots: Sequence[tuple[GradientEdge, torch.Tensor]], inputs: Sequence[GradientEdge]
    ) -> None:
        self._ends = {edge.node for edge in inputs}
        users: dict[Node, list[Node]] = {}
        for node in reachable((root.node for root, _ in roots), self._ends):
            for name, what in _UNSPLITTABLE.items():
                if name_of(node).startswith(name):
                    raise LdtError(
                        f"its backward cannot be split: {what} computes the gradients of inputs and parameters "
                        "together. Remove it, or use a plan without split backward"
                    )
            for child in children(node):
                users.setdefault(child, []).append(node)
        self.between = set(depth_first(self._ends, lambda node: users.get(node, ())))
        self.branches = {
            node: leaves for node in self.between - self._ends if (leaves := self._leaves_beside(node))
        }

    def groups(self, weight_roots: Iterable[Node]) -> list[_Group]:
        """Group branches and ``weight_roots``, which lead to no input: sources that share a leaf are together."""
        by_leaf: dict[Node, _Group] = {}
        leaves_by_source = {
            **self.branches,
            **{node: set(accumulate_grad_nodes([node])) for node in weight_roots},
        }
        for source, leaves in leaves_by_source.items():
            group = _Group({source}, set(leaves))
            for other in {id(found): found for leaf in leaves if (found := by_leaf.get(leaf))}.values():
                group.sources.update(other.sources)
                group.leaves.update(other.leaves)
            by_leaf.update(dict.fromkeys(group.leaves, group))
        return list({id(group): group for group in by_leaf.values()}.values())

    def _leaves_beside(self, node: Node) -> set[Node]:
        return set(accumulate_grad_nodes(child for child in children(node) if child not in self.between))
