"""The grid of a plan around a place, for error texts."""

from __future__ import annotations

from collections.abc import Mapping

from ldt.plan.plan import Plan
from ldt.topology import Node

__all__ = ["excerpt"]


def excerpt(plan: Plan, places: Mapping[Node, int], before: int = 4, after: int = 3) -> str:
    """The rows of the nodes in ``places`` around their index there, which is marked: ``>1F2<``."""
    windows = {node: _window(plan, node, index, before, after) for node, index in places.items()}
    width = max((len(cell) for cells in windows.values() for cell in cells), default=0)
    lines = []
    for node, cells in windows.items():
        lines.append(f"  {node!s:>5} | " + " ".join(cell.center(width) for cell in cells).rstrip())
    return "\n".join(lines)


def _window(plan: Plan, node: Node, place: int, before: int, after: int) -> list[str]:
    row = plan.rows[node]
    cells = []
    for index in range(place - before, place + after + 1):
        if 0 <= index < len(row):
            cells.append(f">{row[index]}<" if index == place else str(row[index]))
        else:
            cells.append(">end<" if index == place else "")
    first, last = place - before, place + after
    cells.insert(0, "..." if first > 0 else "")
    cells.append("..." if last + 1 < len(row) else "")
    return cells
