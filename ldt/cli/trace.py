"""Summarizes a trace of a step: what each node computed, where it waited longest, and what each channel carried.

With ``--merge`` it also adds what ``torch.profiler`` recorded of each rank in an ``ldt.Profile``.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ldt.cli import trace_kernels
from ldt.cli.table import table
from ldt.errors import PlanError
from ldt.plan import Event, Kind, Timeline, draw_text, read_trace
from ldt.topology import Channel, Node

_SHOWN = 5e-5  # seconds; less is 0.0 ms
_KINDS = {"forward": (Kind.F,), "backward": (Kind.B, Kind.I), "weights": (Kind.W,)}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = "example: python -m ldt trace build/demo/trace.json --draw"
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="written with chrome_trace(), or by Timeline.save(); may be compressed",
    )
    parser.add_argument("--draw", action="store_true", help="draw the step, too")
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        default=[],
        metavar="KERNELS",
        help="what ranks of an ldt.Profile recorded, kernels-<rank>.json.gz: add it to the trace",
    )
    parser.add_argument(
        "--out", type=Path, help="the file to write with --merge; ends with .gz to compress it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the summary, and write what is to be merged. Returns 2 and prints the error if a file cannot be read."""
    try:
        if bool(arguments.merge) != (arguments.out is not None):
            raise PlanError("--merge needs --out, the file to write, and the other way round")
        timeline = read_trace(arguments.file)
        if arguments.merge:
            trace_kernels.write(trace_kernels.merged(arguments.file, arguments.merge), arguments.out)
    except (PlanError, OSError) as error:
        print(f"python -m ldt trace: {error}", file=sys.stderr)
        return 2
    if arguments.merge:
        print(f"wrote {arguments.out} with the kernels of {len(arguments.merge)} ranks\n")
    print(f"{_ms(timeline.makespan)}, bubble {timeline.bubble:.1%}, {timeline.topology.to_text()}\n")
    if arguments.draw:
        print(draw_text(timeline, shutil.get_terminal_size((120, 24)).columns) + "\n")
    print(table(list(_nodes(timeline))))
    if timeline.transfers:
        print("\n" + table(list(_channels(timeline))))
    return 0


def _nodes(timeline: Timeline) -> Iterator[list[str]]:
    yield ["node", "computing", "share", *_KINDS, "longest wait"]
    of_node: defaultdict[Node, list[Event]] = defaultdict(list)
    for event in timeline.compute:
        of_node[event.node].append(event)
    for node, busy in timeline.busy.items():
        events = of_node[node]
        parts = [sum(_seconds(e) for e in events if e.action.kind in kinds) for kinds in _KINDS.values()]
        share = f"{timeline.busy_share[node]:.1%}"
        yield [f"node {node}", _ms(busy), share, *map(_ms, parts), _longest_wait(events)]


def _longest_wait(events: list[Event]) -> str:
    waits = [
        (after.start - before.end, str(after.action))
        for before, after in itertools.pairwise(sorted(events, key=lambda event: event.start))
    ]
    seconds, action = max(waits, default=(0.0, ""))
    return f"{_ms(seconds)} before {action}" if seconds >= _SHOWN else "-"


def _channels(timeline: Timeline) -> Iterator[list[str]]:
    yield ["channel", "messages", "mean", "longest", "in flight"]
    of_channel: defaultdict[Channel, list[Event]] = defaultdict(list)
    for event in timeline.transfers:
        if event.channel is not None:
            of_channel[event.channel].append(event)
    for channel in timeline.topology.channels:
        if events := of_channel.get(channel):
            times = list(map(_seconds, events))
            share = _covered(events) / timeline.makespan if timeline.makespan > 0 else 0.0
            mean, longest = sum(times) / len(times), max(times)
            yield [channel.name, str(len(events)), _ms(mean), _ms(longest), f"{share:.1%}"]


def _covered(events: list[Event]) -> float:
    """Seconds in which at least one of the events was under way."""
    covered, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        covered += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return covered


def _seconds(event: Event) -> float:
    return event.end - event.start


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
