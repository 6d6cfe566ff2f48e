"""Prints and writes the results of training: tables, a trace and a picture."""

from __future__ import annotations

import json
from pathlib import Path

from tabulate import tabulate

import ldt
from ldt.plan import Timeline, chrome_trace, draw
from text.measure import Measurement

__all__ = ["print_report", "write_files"]

LAST_STEPS = 20
_ALIGN = ("left", "left", "right", "right", "right")


def print_report(measurement: Measurement, held_out: ldt.StepResult, prompt: str, continuation: str) -> None:
    """Print the loss, the generated text, and where time and bytes went."""
    losses = measurement.losses
    assert held_out.loss is not None
    last = losses[-LAST_STEPS:]
    print(f"\nloss: {losses[0]:.3f} in the first step, {sum(last) / len(last):.3f} in the last {len(last)}, "
          f"{float(held_out.loss):.3f} on text not seen in training")  # fmt: skip
    print(f"\n{prompt}|{continuation}")
    print(f"\n{_nodes(measurement)}\n")
    if measurement.planned.topology.channels:
        print(f"{_channels(measurement)}\n")
    print(f"{_bubble(measurement)}\n")


def write_files(measurement: Measurement, folder: Path) -> list[Path]:
    """Write trace and picture into ``folder``, which is created if missing. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "trace.json"
    trace.write_text(json.dumps(chrome_trace(measurement.measured)), encoding="utf-8")
    picture = folder / "timeline.png"
    timelines = {
        "planned, with the measured times of the chunks": _in_milliseconds(measurement.planned),
        "measured": _in_milliseconds(measurement.measured),
    }
    draw(timelines, picture, title="One training step", unit="ms")
    return [trace, picture]


def _nodes(measurement: Measurement) -> str:
    rows = []
    for stats in measurement.of_leaders():
        times = (stats.computing, stats.waiting, stats.idle)
        kind = "edge" if stats.node.stage == 0 else "cloud"
        chunks = ", ".join(map(str, stats.topology.chunks_of(stats.node.stage)))
        shares = [f"{seconds:.1f} ({seconds / stats.seconds:.0%})" for seconds in times]
        rows.append([f"{kind} {stats.node}", chunks, *shares])
    return tabulate(rows, ["node", "chunks", "computing [s]", "waiting [s]", "idle [s]"], colalign=_ALIGN)


def _channels(measurement: Measurement) -> str:
    sent = {stats.node: stats.channels for stats in measurement.of_leaders()}
    rows = []
    for channel in measurement.planned.topology.channels:
        messages, size = sent[channel.source][channel.name]
        what = "activations" if channel.direction == "F" else "gradients"
        rows.append([channel.name, what, messages, size])
    return tabulate(rows, ["channel", "carries", "messages", "bytes"], intfmt=",")


def _bubble(measurement: Measurement) -> str:
    named = (("planned", measurement.planned), ("measured", measurement.measured))
    rows = [[name, f"{1e3 * timeline.makespan:.1f}", f"{timeline.bubble:.1%}"] for name, timeline in named]
    return tabulate(rows, ["one step", "makespan [ms]", "bubble"], colalign=("left", "right", "right"))


def _in_milliseconds(timeline: Timeline) -> Timeline:
    events = (event._replace(start=1e3 * event.start, end=1e3 * event.end) for event in timeline.events)
    return Timeline(timeline.topology, tuple(events))
