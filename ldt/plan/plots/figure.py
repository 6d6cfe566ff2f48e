"""Draws timelines as a picture. Needs matplotlib, which is imported only here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ldt.errors import PlanError
from ldt.plan.action import Kind
from ldt.plan.timeline import Event, Timeline
from ldt.topology import Node, Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

_COLOURS = {Kind.F: "#5b8bd0", Kind.B: "#63a85a", Kind.I: "#9ccb8f", Kind.W: "#e3ab4b"}
_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
_LAP_SHADE = 0.74  # brightness of each lap's colour relative to the previous lap
_IDLE = "#e9ebee"
_TRANSFER = {"F": "#1f3d73", "B": "#2e5a1c"}
_BAR = 0.7  # height of a bar, as a share of its row
_POINTS_PER_INCH = 72
_NUMBER_POINTS = 7.0


def draw(
    timelines: Mapping[str, Timeline], path: str | Path, *, title: str | None = None, unit: str = "s"
) -> Path:
    """Write a picture of ``timelines``, one above the other, as PNG or SVG by the suffix of ``path``.

    The keys are captions, for example "planned" and "measured". A bar is a compute action with the number of its
    microbatch (darker: a later lap), grey is idle time, a thin line is a transfer. ``unit`` names the unit of time.
    Time axes share one scale if the makespans are within a factor of 2 of each other. Returns ``path``. Raises
    ImportError, which says what to install, without matplotlib.
    """
    if not timelines:
        raise PlanError("draw needs at least one timeline, for example {'planned': simulate(plan, costs)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("draw needs matplotlib: pip install 'ldt-torch[plot]'") from error

    spans = [timeline.makespan or 1.0 for timeline in timelines.values()]
    one_scale = max(spans) <= 2 * min(spans)
    rows = [len(timeline.topology.nodes) for timeline in timelines.values()]
    width = _width(timelines.values())
    figure = Figure(figsize=(width, 1.1 + sum(0.85 + 0.42 * count for count in rows)), layout="constrained")
    axes = figure.subplots(len(rows), 1, squeeze=False, height_ratios=[1.5 + count for count in rows])[:, 0]
    for axis, (name, timeline), span in zip(axes, timelines.items(), spans, strict=True):
        shown = max(spans) if one_scale else span
        _draw_timeline(axis, timeline, shown, 0.85 * width)
        axis.set_title(f"{name}: {_summary(timeline, unit)}", loc="left", fontsize=10)
        axis.set_xlabel(f"time [{unit}]", fontsize=9)
    _draw_legend(figure, timelines.values())
    figure.suptitle(title or "Pipeline timeline", fontsize=13, fontweight="bold")
    path = Path(path)
    figure.savefig(path, dpi=150)
    return path


def _width(timelines: Iterable[Timeline]) -> float:
    """Inches: wide enough for the numbers in most bars, up to a limit."""
    longest = max(max(_count_per_node(timeline).values(), default=0) for timeline in timelines)
    return min(max(10.0, 1.5 + 0.3 * longest), 28.0)


def _count_per_node(timeline: Timeline) -> dict[object, int]:
    counts: dict[object, int] = {}
    for event in timeline.compute:
        counts[event.node] = counts.get(event.node, 0) + 1
    return counts


def _summary(timeline: Timeline, unit: str) -> str:
    return f"makespan {timeline.makespan:.4g} {unit}, bubble {timeline.bubble:.1%}"


def _draw_timeline(axis: Axes, timeline: Timeline, span: float, inches: float) -> None:
    nodes = timeline.topology.nodes
    row_of = {node: row for row, node in enumerate(nodes)}
    for row in row_of.values():
        axis.barh(row, timeline.makespan, height=_BAR, color=_IDLE, linewidth=0)
    for event in timeline.compute:
        _draw_bar(axis, timeline, event, row_of[event.node], inches / span)
    for event in timeline.transfers:  # behind the bars, so that numbers stay visible
        assert event.channel is not None
        begin, end = row_of[event.node], row_of[event.channel.target]
        edge = _BAR / 2 if end > begin else -_BAR / 2  # from one row's side to the near side of the other
        times = (event.start - timeline.start, event.end - timeline.start)
        colour = _TRANSFER[event.channel.direction]
        axis.plot(times, (begin + edge, end - edge), color=colour, linewidth=0.8, alpha=0.8, zorder=1.5)
    axis.set_yticks(range(len(nodes)), [_label(timeline.topology, node) for node in nodes], fontsize=9)
    axis.set_xlim(0, span)
    axis.set_ylim(len(nodes) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _label(topology: Topology, node: Node) -> str:
    if node.stage:
        return f"cloud {node}"
    serves = f"\nserves {', '.join(map(str, topology.cloud_replicas(node)))}" if topology.served > 1 else ""
    return f"edge {node}{serves}"


def _draw_bar(axis: Axes, timeline: Timeline, event: Event, row: int, inches_per_time: float) -> None:
    begin, duration = event.start - timeline.start, event.end - event.start
    earlier = timeline.topology.chunks_of(event.node.stage).index(event.action.chunk)
    colour = _shade(_COLOURS[event.action.kind], earlier)
    axis.barh(
        row, duration, left=begin, height=_BAR, color=colour, edgecolor="white", linewidth=0.5, zorder=2
    )
    number = str(event.action.microbatch)
    if duration * inches_per_time * _POINTS_PER_INCH > 0.8 * _NUMBER_POINTS * len(number):
        middle = begin + duration / 2
        style = {"ha": "center", "va": "center", "fontsize": _NUMBER_POINTS, "color": "white"}
        axis.text(middle, row, number, zorder=4, **style)  # type: ignore[arg-type]


def _shade(colour: str, lap: int) -> tuple[float, float, float]:
    red, green, blue = (int(colour[start : start + 2], 16) / 255 * _LAP_SHADE**lap for start in (1, 3, 5))
    return red, green, blue


def _draw_legend(figure: Figure, timelines: Iterable[Timeline]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    events = [event for timeline in timelines for event in timeline.events]
    kinds = {event.action.kind for event in events}
    directions = {event.channel.direction for event in events if event.channel is not None}
    handles: list[Any] = [
        Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in _COLOURS if kind in kinds
    ]
    handles.append(Patch(color=_IDLE, label="idle"))
    for direction, name in (("F", "activations"), ("B", "gradients")):
        if direction in directions:
            handles.append(
                Line2D([], [], color=_TRANSFER[direction], linewidth=1, label=f"transfer of {name}")
            )
    handles.append(Line2D([], [], linestyle="none", label="darker: later chunks"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
