"""Walks the autograd graph: a node, and the nodes that backward runs after it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator

from torch.autograd.graph import Node

__all__ = ["REENTRANT_CHECKPOINT", "accumulate_grad_nodes", "children", "depth_first", "name_of", "reachable"]

REENTRANT_CHECKPOINT = "CheckpointFunction"  # prefix of the name of its nodes


def children(node: Node) -> list[Node]:
    """The nodes that backward runs next, one entry for each edge."""
    return [child for child, _ in node.next_functions if child is not None]


def accumulate_grad_nodes(starts: Iterable[Node], ends: Container[Node] = ()) -> Iterator[Node]:
    """The AccumulateGrad nodes that backward runs from ``starts`` up to ``ends``."""
    return (node for node in reachable(starts, ends) if name_of(node).endswith("AccumulateGrad"))


def name_of(node: Node) -> str:
    """The name of a node. A custom function may have hidden the method by an attribute ``ctx.name``."""
    name: str = type(node).name(node)
    return name


def reachable(starts: Iterable[Node], ends: Container[Node] = ()) -> Iterator[Node]:
    """The nodes that backward runs from ``starts`` up to and including ``ends``."""
    return depth_first(starts, lambda node: () if node in ends else children(node))


def depth_first(starts: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """``starts`` and every node that ``neighbours`` leads to, each once, in depth-first order."""
    stack = list(dict.fromkeys(starts))
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        fresh = [neighbour for neighbour in dict.fromkeys(neighbours(node)) if neighbour not in seen]
        seen.update(fresh)
        stack += fresh
