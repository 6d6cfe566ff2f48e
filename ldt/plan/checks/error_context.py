"""Prints the rows of a plan around given positions, for error texts."""

from __future__ import annotations

from collections.abc import Mapping

from ldt.plan.plan import Plan
from ldt.topology import Node

__all__ = ["error_context"]


def error_context(plan: Plan, positions: Mapping[Node, int], before: int = 4, after: int = 3) -> str:
    """Return the rows of the nodes in ``positions`` around their index, which is marked: ``>1F2<``."""
    windows = {node: _window(plan, node, index, before, after) for node, index in positions.items()}
    width = max((len(cell) for cells in windows.values() for cell in cells), default=0)
    lines = []
    for node, cells in windows.items():
        lines.append(f"  {node!s:>5} | " + " ".join(cell.center(width) for cell in cells).rstrip())
    return "\n".join(lines)


def _window(plan: Plan, node: Node, position: int, before: int, after: int) -> list[str]:
    row = plan.rows[node]
    first, last = position - before, position + after
    cells = []
    for index in range(first, last + 1):
        if 0 <= index < len(row):
            cells.append(f">{row[index]}<" if index == position else str(row[index]))
        else:
            cells.append(">end<" if index == position else "")
    cells.insert(0, "..." if first > 0 else "")
    cells.append("..." if last + 1 < len(row) else "")
    return cells
