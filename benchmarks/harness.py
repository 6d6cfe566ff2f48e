"""What all benchmarks share: ranks, rows with time and correctness side by side, and an exit code that is the gate.

Output is a table whose context stands in lines that begin with ``#``; ``--json FILE`` writes the same rows. Every
row has ``wrong``, which counts elements that are not what they must be; any makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ldt


class Row(Protocol):
    """A dataclass whose fields are the columns of the table: ``COLUMNS`` has title and format of each."""

    COLUMNS: ClassVar[Mapping[str, str]]

    @property
    def wrong(self) -> int:
        """Elements that are not what they must be."""


def parser(description: str) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    return options


def run(
    ranks: int,
    measure: Callable[[Any], Sequence[Row]],
    kind: type[Row],
    arguments: argparse.Namespace,
    context: str,
    backend: str = "gloo",
) -> int:
    """Run ``measure(arguments)`` on ranks, print rank 0's rows of ``kind``, and return the exit code.

    With "nccl" each rank has the GPU of its number.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows"
        inputs = (ranks, f"file://{folder}/store", str(result), measure, arguments, backend)
        mp.start_processes(_rank, inputs, nprocs=ranks, start_method="spawn")  # type: ignore
        rows = [kind(**row) for row in json.loads(result.read_text())]
    notes = [
        f"# {context}",
        f"# ldt {ldt.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores ({platform.machine()}), {ranks} processes, {backend}"
        + (f", {torch.cuda.get_device_name()}" if backend == "nccl" else ""),
    ]
    sys.stdout.write("\n".join([*notes, *_table(kind, rows)]) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"context": notes, "rows": list(map(vars, rows))}, indent=1))
    return 1 if any(row.wrong for row in rows) else 0


def _table(kind: type[Row], rows: Sequence[Row]) -> list[str]:
    widths = [f"{spec[0]}{re.search('[0-9]+', spec)[0]}" for spec in kind.COLUMNS.values()]  # type: ignore[index]
    head = " ".join(format(title, width) for title, width in zip(kind.COLUMNS, widths, strict=True))
    lines = [
        " ".join(
            format(value, spec) for value, spec in zip(vars(row).values(), kind.COLUMNS.values(), strict=True)
        )
        for row in rows
    ]
    return [f"#{head[1:] if head.startswith(' ') else head}", *lines]


def _rank(
    rank: int,
    ranks: int,
    store: str,
    result: str,
    measure: Callable[[Any], Sequence[Row]],
    arguments: Any,
    backend: str,
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"  # figures are compared over gloo
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    rows = measure(arguments)
    if rank == 0:
        Path(result).write_text(json.dumps(list(map(vars, rows))))
    dist.barrier()
    dist.destroy_process_group()


def slowest(values: Sequence[float]) -> list[float]:
    """Element by element, the largest value over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return list(tensor.tolist())
