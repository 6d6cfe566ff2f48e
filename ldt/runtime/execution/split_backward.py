"""The backward of one graph in two parts: first the gradients of its inputs, later those of its parameters.

The idea is that of zero-bubble schedules (Qi et al., 2023, "Zero Bubble Pipeline Parallelism"): the neighbour waits for
the gradients of the inputs alone. Nodes between the roots and the inputs run in the first part. Those of them that lead
to parameters as well are the *branches*: what flows into them is kept, and the second part starts there.

So branches run twice, and with them their tensors' hooks and whatever a custom function of theirs does besides; what a
hook returns the second time is not taken. A custom function that changes gradients of its parameters itself runs once.
Functions and hooks that change other parameters, their gradients or buffers are refused
(``ldt.runtime.execution.side_effects``); what else they do they do twice, as does ``retain_grad``. The graph lives
until the second part has run. The engine looks at all nodes behind each branch when it starts there, which makes long
chunks of small layers slow (0.02 s for 100 layers on a CPU).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import checkpoint

from ldt.errors import LdtError
from ldt.runtime.common.autograd_graph import accumulate_grad_nodes, children, depth_first, reachable
from ldt.runtime.execution.side_effects import FunctionWatch, SecondPart

__all__ = ["Start", "WeightPart", "backward_input"]

Start = tuple[torch.Tensor | GradientEdge, torch.Tensor]  # where a backward starts, and with which gradient
# Nodes, by the beginning of their names, whose backward is one piece that does not run under autograd.grad.
_WHOLE = {
    "CompiledFunction": "a compiled function",
    "RegisterPostBackwardFunction": "fully_shard",
    "CheckpointFunction": "torch.utils.checkpoint with use_reentrant=True",
}
_Grads = tuple[torch.Tensor | None, ...]  # what flows into a node, one for each of its outputs


def backward_input(
    starts: Sequence[Start], inputs: Sequence[GradientEdge], watch: FunctionWatch | None = None
) -> tuple[list[torch.Tensor | None], WeightPart]:
    """The gradients of ``inputs`` (None: not used), and what is left to do for the parameters.

    Raises LdtError if the graph holds a node that computes both at once and cannot run twice, also as ``watch`` sees
    it: custom functions that accumulate gradients of their parameters themselves run in the first part alone, others
    must change nothing.
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
                watched.around(node, cut.branches[node], cut.between, hooks)
        through = [(root, grad) for root, grad in roots if root.node in cut.between]
        grads: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if through:
            edges: Any = [root for root, _ in through]  # torch's annotation knows of tensors alone
            grads = torch.autograd.grad(
                edges, inputs, [grad for _, grad in through], retain_graph=True, allow_unused=True
            )
    second = nullcontext if watched is None else watched.check([node.name() for node in custom])
    beside = [(root, grad) for root, grad in roots if root.node not in cut.between]
    groups = cut.groups([root.node for root, _ in beside])
    return list(grads), WeightPart(groups, flows, beside, {} if watched is None else watched.kept, second)


class WeightPart:
    """What is left of a backward: it accumulates into the parameters' ``grad``. Holds the graph until it is run."""

    def __init__(
        self,
        groups: Sequence[_Group],
        flows: dict[Node, _Grads],
        beside: Sequence[tuple[GradientEdge, torch.Tensor]],
        kept: dict[Node, list[tuple[GradientEdge, torch.Tensor]]],
        around: SecondPart,
    ) -> None:
        self._groups = list(groups)
        self._flows = flows
        self._beside = list(beside)
        self._kept = kept  # of nodes that are not run again: what they returned
        self._around = around

    def run(self) -> None:
        """Once. Bit-equal to an unsplit backward: each parameter gets one sum, added up in the same order."""
        alone = [group for group in self._groups if len(group.sources) == 1]
        shared = [group for group in self._groups if len(group.sources) > 1]
        with self._around():
            with _recompute_once():  # allowed where backwards have no node in common
                for group in alone:
                    self._accumulate(group)
            for group in shared:
                self._accumulate(group)
        self._groups.clear()
        self._beside.clear()
        self._flows.clear()
        self._kept.clear()

    def _accumulate(self, group: _Group) -> None:
        nodes = [node for node in self._flows if node in group.sources and node not in self._kept]
        starts = [(root, grad) for root, grad in self._beside if root.node in group.sources]
        for node in nodes:
            flow = enumerate(self._flows[node])
            starts += [(GradientEdge(node, index), grad) for index, grad in flow if grad is not None]
        starts += [start for node in self._kept if node in group.sources for start in self._kept[node]]
        if not starts:
            return
        with ExitStack() as hooks:
            for node in nodes:
                # One source may lie behind another, and a tensor's own hooks run again: what was kept is right.
                hooks.enter_context(node.register_prehook(partial(_instead, self._flows[node])))
            edges: Any = [edge for edge, _ in starts]
            targets: Any = [GradientEdge(leaf, 0) for leaf in group.leaves]
            torch.autograd.backward(edges, [grad for _, grad in starts], retain_graph=True, inputs=targets)


def _recompute_once() -> AbstractContextManager[object]:
    """Several backwards together recompute under torch.utils.checkpoint once; a torch without such groups, each."""
    group = getattr(checkpoint, "GraphExecGroup", None)
    return nullcontext() if group is None else group()


def _instead(kept: _Grads, _: _Grads) -> _Grads:
    return kept


class _Group(NamedTuple):
    """Where a backward for some parameters starts, and their nodes in the graph."""

    sources: set[Node]
    leaves: set[Node]


class _Cut:
    """The nodes between roots and inputs, and for each branch among them the leaves that hang on it alone."""

    def __init__(
        self, roots: Sequence[tuple[GradientEdge, torch.Tensor]], inputs: Sequence[GradientEdge]
    ) -> None:
        self._ends = {edge.node for edge in inputs}
        users: dict[Node, list[Node]] = {}
        for node in reachable((root.node for root, _ in roots), self._ends):
            for name, what in _WHOLE.items():
                if node.name().startswith(name):
                    raise LdtError(
                        f"its backward cannot be split: {what} computes the gradients of inputs and parameters in "
                        "one go. Change that, or take a plan without split backward"
                    )
            for child in children(node):
                users.setdefault(child, []).append(node)
        self.between = set(depth_first(self._ends, lambda node: users.get(node, ())))
        self.branches = {
            node: leaves for node in self.between - self._ends if (leaves := self._leaves_beside(node))
        }

    def groups(self, beside: Iterable[Node]) -> list[_Group]:
        """Branches, and roots ``beside`` the way to the inputs: those that share a leaf together."""
        by_leaf: dict[Node, _Group] = {}
        for source, leaves in {
            **self.branches,
            **{node: set(accumulate_grad_nodes([node])) for node in beside},
        }.items():
            group = _Group({source}, set(leaves))
            for other in {id(found): found for leaf in leaves if (found := by_leaf.get(leaf))}.values():
                group.sources.update(other.sources)
                group.leaves.update(other.leaves)
            by_leaf.update(dict.fromkeys(group.leaves, group))
        return list({id(group): group for group in by_leaf.values()}.values())

    def _leaves_beside(self, node: Node) -> set[Node]:
        return set(accumulate_grad_nodes(child for child in children(node) if child not in self.between))
