"""Walks over the graph that autograd records: nodes, and those that a backward would run after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch.autograd.graph import Node

__all__ = ["accumulate_grad_nodes", "children", "depth_first", "reachable"]


def children(node: Node) -> list[Node]:
    """The nodes that run next, once for each edge."""
    return [child for child, _ in node.next_functions if child is not None]


def accumulate_grad_nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes behind ``nodes`` that accumulate gradients of leaves."""
    return (node for node in reachable(nodes, set()) if node.name().endswith("AccumulateGrad"))


def reachable(starts: Iterable[Node], ends: set[Node]) -> Iterator[Node]:
    """The nodes that a backward from ``starts`` runs, those of ``ends`` included and none behind them."""
    return depth_first(starts, lambda node: () if node in ends else children(node))


def depth_first(starts: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """``starts`` and all that ``neighbours`` lead to, each once, depth first."""
    stack = list(dict.fromkeys(starts))
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        fresh = [neighbour for neighbour in dict.fromkeys(neighbours(node)) if neighbour not in seen]
        seen.update(fresh)
        stack += fresh
