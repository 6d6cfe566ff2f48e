"""Plots rows: for each type of row one panel per value, with lines over sizes or bars by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Picture", "draw"]


class Picture(NamedTuple):
    """Names of fields: the one on the x axis, those to draw (one panel each), and those that label the lines.

    A row type has one as its class variable ``PICTURE``.
    """

    x: str
    y: Sequence[str]
    by: Sequence[str]


def draw(rows: Sequence[Any], path: Path) -> None:
    """Write the picture of ``rows``; rows without a value are left out of its panel."""
    from matplotlib.figure import Figure  # needed for this option only

    kinds = {type(row): [other for other in rows if type(other) is type(row)] for row in rows}
    panels = [(members, y) for kind, members in kinds.items() for y in kind.PICTURE.y]
    figure = Figure(figsize=(6 * max(1, len(panels)), 4.5), layout="constrained")
    for axes, (members, y) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _panel(axes, members, y)
    figure.savefig(path)


def _panel(axes: Any, rows: Sequence[Any], y: str) -> None:
    picture: Picture = type(rows[0]).PICTURE
    lines: dict[str, dict[Any, float]] = {}
    for row in rows:
        if getattr(row, y) is not None:
            name = ", ".join(str(getattr(row, part) or "-") for part in picture.by)
            lines.setdefault(name, {})[getattr(row, picture.x)] = getattr(row, y)
    if isinstance(getattr(rows[0], picture.x), str):
        _bars(axes, lines)
        axes.set_xlabel(_title(rows[0], y))
    else:
        _curves(axes, lines)
        axes.set(xlabel=_title(rows[0], picture.x), ylabel=_title(rows[0], y))
    axes.legend(fontsize=7)


def _curves(axes: Any, lines: dict[str, dict[Any, float]]) -> None:
    for name, points in lines.items():
        axes.plot(list(points), list(points.values()), "o-", label=name)
    if all(min(points) > 0 and min(points.values()) > 0 for points in lines.values()):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")


def _bars(axes: Any, lines: dict[str, dict[Any, float]]) -> None:
    places = list(dict.fromkeys(x for points in lines.values() for x in points))
    height = 0.8 / max(1, len(lines))
    for number, (name, points) in enumerate(lines.items()):
        offsets = [place + number * height for place, x in enumerate(places) if x in points]
        axes.barh(offsets, [points[x] for x in places if x in points], height, align="edge", label=name)
    axes.set_yticks([place + 0.4 for place in range(len(places))], places, fontsize=7)
    axes.invert_yaxis()


def _title(row: Any, name: str) -> str:
    return str(type(row).__dataclass_fields__[name].metadata["title"])
