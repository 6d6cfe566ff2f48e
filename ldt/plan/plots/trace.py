"""Converts timelines to Chrome traces for Perfetto and chrome://tracing, and reads those again."""

from __future__ import annotations

import json
import os
from typing import Any

from ldt.plan.files import load
from ldt.plan.timeline import Event, Timeline
from ldt.untrusted import parse

__all__ = ["chrome_trace", "read_trace"]

_MICROSECONDS = 1e6
_COMPUTE, _TRANSFERS = 0, 1  # the two threads of a node's process


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return a dict to write as JSON: one process per node, with compute and outgoing transfers as its two rows.

    Seconds become microseconds, with zero at the start of the timeline. Transfers are asynchronous events, because
    several may be in flight at once. ``otherData`` has the timeline for ``read_trace``; viewers ignore it.
    """
    rows = {node: row for row, node in enumerate(timeline.topology.nodes)}
    events: list[dict[str, Any]] = []
    for node, row in rows.items():
        chunks = ", ".join(map(str, timeline.topology.chunks_of(node.stage)))
        side = "edge" if node.stage == 0 else "cloud"
        events.append(_metadata("process_name", row, f"node {node} ({side}, chunks {chunks})"))
        events.append({"name": "process_sort_index", "ph": "M", "pid": row, "args": {"sort_index": row}})
        events.append(_metadata("thread_name", row, "compute"))
    for number, event in enumerate(timeline.events):
        begin, end = ((moment - timeline.start) * _MICROSECONDS for moment in (event.start, event.end))
        common = {"name": str(event.action), "pid": rows[event.node], "args": _details(event)}
        if event.channel is None:
            kind = event.action.kind.value
            events.append(
                {**common, "ph": "X", "cat": kind, "tid": _COMPUTE, "ts": begin, "dur": end - begin}
            )
        else:
            transfer = {**common, "cat": "transfer", "id": number, "tid": _TRANSFERS}
            events.append({**transfer, "ph": "b", "ts": begin})
            events.append({**transfer, "ph": "e", "ts": end})
    other = {"timeline": json.loads(timeline.to_json())}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def read_trace(path: str | os.PathLike[str]) -> Timeline:
    """Read the timeline of a file with the JSON of ``chrome_trace``, or one of ``Timeline.save``.

    Raises PlanError naming the file if it holds neither, OSError if it is not there.
    """
    return load(path, _timeline_in)


def _timeline_in(text: str) -> Timeline:
    try:
        found = parse(text)
    except ValueError:
        found = None
    other = found.get("otherData") if isinstance(found, dict) else None
    inner = other.get("timeline") if isinstance(other, dict) else None
    return Timeline.from_json(text if inner is None else json.dumps(inner))


def _metadata(name: str, row: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": row, "tid": _COMPUTE, "args": {"name": value}}


def _details(event: Event) -> dict[str, Any]:
    details: dict[str, Any] = {"chunk": event.action.chunk, "microbatch": event.action.microbatch}
    if event.channel is not None:
        details["channel"] = event.channel.name
    return details
