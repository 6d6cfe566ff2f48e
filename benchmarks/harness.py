"""What all benchmarks share: ranks, rows with time and correctness side by side, and an exit code that is the gate.

Output is a table whose context stands in lines that begin with ``#``; ``--json FILE`` writes the same rows. Times are
in microseconds per message: the median and the 99th percentile over ``count`` messages (below 100 of them: the
longest), the slowest rank of each.
``wrong`` counts elements that differ from what was sent; any makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ldt


@dataclass(frozen=True)
class Row:
    """One measurement: ``bytes`` per message; ``exposed`` is the time blocked in wait() after the compute gap."""

    bytes: int
    count: int
    path: str
    p50: float
    p99: float
    exposed: float
    gigabytes_per_second: float
    wrong: int


def parser(description: str) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    sizes = [1 << 12, 1 << 20, 16 << 20, 64 << 20]
    options.add_argument(
        "--sizes", type=size, nargs="+", default=sizes, help="bytes per message: 4096, 64KiB, 16MiB"
    )
    options.add_argument("--count", type=int, default=30, help="messages per row")
    return options


def size(text: str) -> int:
    """Bytes from "4096", "64KiB" or "16MiB"."""
    for unit, factor in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def run(ranks: int, measure: Callable[..., list[Row]], arguments: argparse.Namespace, context: str) -> int:
    """Run ``measure(arguments)`` on gloo ranks, print rank 0's rows, and return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows"
        inputs = (ranks, f"file://{folder}/store", str(result), measure, arguments)
        mp.start_processes(_rank, inputs, nprocs=ranks, start_method="spawn")  # type: ignore
        rows = [Row(**row) for row in json.loads(result.read_text())]
    lines = [
        f"# {context}",
        f"# ldt {ldt.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores ({platform.machine()}), {ranks} processes, gloo",
        f"#{'bytes':>11} {'count':>6} {'path':<22} {'p50 µs':>10} {'p99 µs':>10} {'exposed µs':>11} "
        f"{'GB/s':>7} {'wrong':>6}",
    ]
    lines += [
        f"{row.bytes:>12} {row.count:>6} {row.path:<22} {row.p50:>10.0f} {row.p99:>10.0f} {row.exposed:>11.0f} "
        f"{row.gigabytes_per_second:>7.2f} {row.wrong:>6}"
        for row in rows
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"context": lines[:2], "rows": [asdict(row) for row in rows]}, indent=1)
        )
    return 1 if any(row.wrong for row in rows) else 0


def _rank(
    rank: int, ranks: int, store: str, result: str, measure: Callable[..., list[Row]], arguments: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    rows = measure(arguments)
    if rank == 0:
        Path(result).write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def slowest(values: Sequence[float]) -> list[float]:
    """Element by element, the largest value over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return list(tensor.tolist())


def row(path: str, message_bytes: int, seconds: Sequence[float], exposed: Sequence[float], wrong: int) -> Row:
    """The row of this measurement over all ranks; every rank calls it with as many values."""
    times, blocked = slowest(seconds), slowest(exposed)
    total_wrong = torch.tensor(wrong)
    dist.all_reduce(total_wrong)
    median = statistics.median(times)
    return Row(
        bytes=message_bytes,
        count=len(times),
        path=path,
        p50=median * 1e6,
        p99=sorted(times)[max(0, round(0.99 * len(times)) - 1)] * 1e6,
        exposed=statistics.median(blocked) * 1e6,
        gigabytes_per_second=message_bytes / median / 1e9,
        wrong=int(total_wrong),
    )
