"""Adds what torch.profiler recorded of each rank to the trace of a profile, on its clock and in the rank's process."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ldt.errors import PlanError
from ldt.untrusted import decompressed, parse, quoted, read_file

_MAX_BYTES = 2 << 30
_FIRST_ROW = 100  # those of a rank's own actions come first
_WITH_ID = ("s", "t", "f", "b", "n", "e")  # phases of events whose ids connect them


def merged(trace_file: Path, kernel_files: Iterable[Path]) -> dict[str, Any]:
    """The trace with the events of ``kernel_files``. Raises PlanError, naming the file, if one does not fit it."""
    trace = _read(trace_file)
    try:
        profile = trace["otherData"]["profile"]
        begins, clocks = float(profile["begins"]), [float(ahead) for ahead in profile["clocks"]]
        last = max(float(event.get("ts", 0.0)) for event in trace["traceEvents"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise PlanError(f"{trace_file} is not the trace.json of an ldt.Profile") from None
    for file in kernel_files:
        kernels = _read(file)
        try:
            rank = int(kernels["ldt"]["rank"])
            if rank not in range(len(clocks)):
                raise ValueError
            shift = (kernels.get("baseTimeNanoseconds", 0) / 1e9 - begins - clocks[rank]) * 1e6
            events = list(_moved(kernels["traceEvents"], rank, shift))
            times = [event["ts"] for event in events if "dur" in event]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise PlanError(f"{file} is not the kernels-<rank>.json.gz of a rank of this profile") from None
        if not times or min(times) > last or max(times) < 0:
            raise PlanError(f"{file} was recorded at another time than {trace_file}: is it of another run?")
        trace["traceEvents"] += events
    return trace


def write(trace: dict[str, Any], file: Path) -> None:
    """Write the JSON of ``trace``, compressed if the name of ``file`` ends with .gz."""
    data = json.dumps(trace).encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = parse(decompressed(read_file(file, _MAX_BYTES), _MAX_BYTES))
    except (OSError, ValueError) as error:
        raise PlanError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise PlanError(f"{file} is not a trace: it has {quoted(found)}")
    return found


def _moved(events: Iterable[dict[str, Any]], rank: int, shift: float) -> Iterator[dict[str, Any]]:
    """The events of one rank: later by ``shift`` microseconds, on rows of the rank's own process."""
    rows: dict[tuple[Any, Any], int] = {}
    names: dict[tuple[Any, Any], str] = {}
    labels: dict[Any, str] = {}
    numbers = itertools.count(_FIRST_ROW)
    for event in events:
        process, thread = event.get("pid"), event.get("tid")
        if not isinstance(process, int):
            continue  # marks of torch's own
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[process, thread] = str(event["args"]["name"])
            elif event["name"] == "process_labels":
                labels[process] = str(event["args"]["labels"])
            continue
        if (process, thread) not in rows:
            rows[process, thread] = next(numbers)
        moved = {**event, "pid": rank, "tid": rows[process, thread], "ts": float(event["ts"]) + shift}
        if event["ph"] in _WITH_ID:
            # A number, as viewers read texts as hexadecimal ones.
            moved["id"] = (rank + 1) << 32 | int(event["id"])
        yield moved
    for (process, thread), row in rows.items():
        text = f"{labels.get(process, process)} {names.get((process, thread), thread)}"
        common = {"ph": "M", "pid": rank, "tid": row}
        yield {"name": "thread_name", **common, "args": {"name": text}}
        yield {"name": "thread_sort_index", **common, "args": {"sort_index": row}}
