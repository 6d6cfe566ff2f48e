"""Converts timelines to Chrome traces for Perfetto and chrome://tracing, and reads those again."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ldt.plan.files import load
from ldt.plan.timeline import Event, Timeline
from ldt.topology import Node, Topology
from ldt.untrusted import parse

__all__ = ["TraceEvents", "chrome_trace", "describe_node", "read_trace", "trace_of"]

_MICROSECONDS = 1e6
_MAX_BYTES = 2 << 30  # a trace may have kernels, too
_COMPUTE, _TRANSFERS, _SENDS, _RECEIVES = range(4)  # the threads of a process
_ROWS = {_COMPUTE: "compute", _SENDS: "sends", _RECEIVES: "receives"}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return a dict to write as JSON: one process per node, with compute, transfers, sends and receives as its rows.

    Seconds become microseconds, with zero at the start of the timeline. Transfers are asynchronous events of the
    sender, because several may be in flight at once. An arrow (a flow event) leads from a slice among the sends of
    their sender to one among the receives of their receiver; of messages in flight at once, each slice has the part
    after the one before. ``otherData`` has the timeline for ``read_trace``; viewers ignore it.
    """
    pids = {node: pid for pid, node in enumerate(timeline.topology.nodes)}
    trace = TraceEvents(timeline.start)
    for node, pid in pids.items():
        trace.add_process(pid, describe_node(timeline.topology, node))
    trace.add_timeline(timeline, pids)
    return trace_of(trace, timeline)


def trace_of(trace: TraceEvents, timeline: Timeline, **other: Any) -> dict[str, Any]:
    """The whole trace, from which ``read_trace`` reads ``timeline``; ``other`` is kept beside it."""
    data = {"timeline": json.loads(timeline.to_json()), **other}
    return {"traceEvents": trace.events, "displayTimeUnit": "ms", "otherData": data}


def describe_node(topology: Topology, node: Node) -> str:
    """For example "node 1.0 (cloud, chunks 1)"."""
    chunks = ", ".join(map(str, topology.chunks_of(node.stage)))
    return f"node {node} ({'edge' if node.stage == 0 else 'cloud'}, chunks {chunks})"


class TraceEvents:
    """The events of a Chrome trace. All moments are given in seconds, and that of ``zero`` becomes 0."""

    def __init__(self, zero: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._zero = zero
        self._transfers = 0

    def add_process(self, pid: int, name: str) -> None:
        """Name a process and its rows."""
        self._add("process_name", "M", pid, _COMPUTE, args={"name": name})
        self._add("process_sort_index", "M", pid, _COMPUTE, args={"sort_index": pid})
        for row, text in _ROWS.items():
            self._add("thread_name", "M", pid, row, args={"name": text})
            self._add("thread_sort_index", "M", pid, row, args={"sort_index": row})

    def add_bar(self, pid: int, name: str, kind: str, start: float, end: float, **details: Any) -> None:
        """Add something that a process did among its compute."""
        duration = max(0.0, end - start) * _MICROSECONDS
        self._add(name, "X", pid, _COMPUTE, start, cat=kind, dur=duration, args=details)

    def add_mark(self, name: str, moment: float) -> None:
        """Add a line over all processes."""
        self._add(name, "i", 0, _COMPUTE, moment, s="g")

    def add_timeline(self, timeline: Timeline, pids: Mapping[Node, int]) -> None:
        """Add the events of ``timeline``, by the process of each node."""
        for event in timeline.events:
            if event.channel is None:
                details = _details(event)
                self.add_bar(
                    pids[event.node],
                    str(event.action),
                    event.action.kind.value,
                    event.start,
                    event.end,
                    **details,
                )
        first, self._transfers = self._transfers, self._transfers + len(timeline.transfers)
        numbered = list(enumerate(timeline.transfers, first))
        for number, event in numbered:
            for phase, moment in (("b", event.start), ("e", event.end)):
                pid = pids[event.node]
                self._add(
                    str(event.action),
                    phase,
                    pid,
                    _TRANSFERS,
                    moment,
                    **_transfer(number),
                    args=_details(event),
                )
        self._add_arrows(numbered, pids)

    def _add_arrows(self, transfers: list[tuple[int, Event]], pids: Mapping[Node, int]) -> None:
        """Add the slices of sends and receives, which do not overlap, and a flow from the one to the other."""
        sends: dict[Node, list[tuple[int, Event]]] = defaultdict(list)
        receives: dict[Node, list[tuple[int, Event]]] = defaultdict(list)
        for number, event in transfers:  # by start
            assert event.channel is not None
            sends[event.node].append((number, event))
            receives[event.channel.target].append((number, event))
        for node, sent in sends.items():
            ends = [event.start for _, event in sent[1:]] + [float("inf")]
            for (number, event), following in zip(sent, ends, strict=True):
                end = min(_middle(event), following)
                self._add_slice(number, event, (pids[node], _SENDS), str(event.action), "s", event.start, end)
        for node, received in receives.items():
            before = float("-inf")
            for number, event in sorted(received, key=lambda one: one[1].end):
                name, start = str(event.action.counterpart), max(_middle(event), before)
                self._add_slice(number, event, (pids[node], _RECEIVES), name, "f", start, event.end)
                before = event.end

    def _add_slice(
        self, number: int, event: Event, row: tuple[int, int], name: str, flow: str, start: float, end: float
    ) -> None:
        """Add a slice, and in it the start ("s") or end ("f") of the flow ``number``."""
        pid, thread = row
        self._add(name, "B", pid, thread, start, cat="transfer", args=_details(event))
        binding: dict[str, Any] = {"bp": "e"} if flow == "f" else {}  # to this slice, not to the next one
        self._add(str(event.action), flow, pid, thread, start, **_transfer(number), **binding)
        self._add(name, "E", pid, thread, end)

    def _add(
        self, name: str, phase: str, pid: int, row: int, moment: float | None = None, **more: Any
    ) -> None:
        when = {} if moment is None else {"ts": (moment - self._zero) * _MICROSECONDS}
        self.events.append({"name": name, "ph": phase, "pid": pid, "tid": row, **when, **more})


def read_trace(path: str | os.PathLike[str]) -> Timeline:
    """Read the timeline of a file with the JSON of ``chrome_trace``, or one of ``Timeline.save``.

    Raises PlanError naming the file if it holds neither, OSError if it is not there.
    """
    return load(path, _timeline_in, _MAX_BYTES)


def _timeline_in(text: str) -> Timeline:
    try:
        found = parse(text)
    except ValueError:
        found = None
    other = found.get("otherData") if isinstance(found, dict) else None
    inner = other.get("timeline") if isinstance(other, dict) else None
    return Timeline.from_json(text if inner is None else json.dumps(inner))


def _transfer(number: int) -> dict[str, Any]:
    return {"cat": "transfer", "id": number}


def _middle(event: Event) -> float:
    return (event.start + event.end) / 2


def _details(event: Event) -> dict[str, Any]:
    details: dict[str, Any] = {"chunk": event.action.chunk, "microbatch": event.action.microbatch}
    if event.channel is not None:
        details["channel"] = event.channel.name
    return details
