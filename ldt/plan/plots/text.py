"""Draws plans and timelines as text, one line per node."""

from __future__ import annotations

from ldt.plan.action import Kind
from ldt.plan.costs import UNIT_COSTS
from ldt.plan.plan import Plan
from ldt.plan.simulator import simulate
from ldt.plan.timeline import Event, Timeline

__all__ = ["draw_text"]

_FILL = {Kind.F: "-", Kind.B: "=", Kind.I: "=", Kind.W: "+"}


def draw_text(drawn: Plan | Timeline, width: int = 160) -> str:
    """Return a grid of nodes by time, at most ``width`` characters wide.

    Forwards are drawn as ``0F0--``, backwards as ``0B0==``, idle time as dots. If an action's name does not fit, only
    its microbatch or only its fill is drawn. A plan is drawn with a forward of 1 and a backward of 2.
    """
    timeline = simulate(drawn, UNIT_COSTS) if isinstance(drawn, Plan) else drawn
    label = max((len(str(node)) for node in timeline.topology.nodes), default=0)
    scale, columns = _scale(timeline, width - label - 3)
    lines = []
    for node in timeline.topology.nodes:
        line = ["."] * columns
        for event in timeline.compute:
            if event.node == node:
                _draw(line, event, timeline.start, scale)
        lines.append(f"{node!s:>{label}} | {''.join(line)}")
    lines.append(f"{'':>{label}}   makespan {timeline.makespan:.6g}, bubble {timeline.bubble:.1%}")
    return "\n".join(lines) + "\n"


def _scale(timeline: Timeline, room: int) -> tuple[float, int]:
    """Columns per second and total columns: enough to name the shortest action, if it fits."""
    if timeline.makespan <= 0:
        return 0.0, 0
    longest = max((len(str(event.action)) for event in timeline.compute), default=1) + 1
    shortest = min((e.end - e.start for e in timeline.compute if e.end > e.start), default=timeline.makespan)
    scale = min(longest / shortest, max(room, 1) / timeline.makespan)
    return scale, round(scale * timeline.makespan)


def _draw(line: list[str], event: Event, zero: float, scale: float) -> None:
    first, last = round((event.start - zero) * scale), round((event.end - zero) * scale)
    room = last - first
    names = (f"{event.action} ", f"{event.action}", f"{event.action.microbatch}")
    name = next((name.strip() for name in names if len(name.strip()) < room), "")
    fill = _FILL[event.action.kind]
    line[first:last] = list((name + fill * room)[: max(room, 0)])
