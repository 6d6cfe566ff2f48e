"""Shared by all benchmarks: options, ranks, rows with time and correctness, and the exit code as the gate.

The output is a table, with context in lines that begin with ``#``. Each row is printed as soon as it is measured, so a
later failure does not lose it. ``--json FILE`` writes the same rows, ``--plot FILE`` draws them. Every row has a column
``wrong`` that counts incorrect elements; if any row has one, the exit code is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import pickle
import platform
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from clock import meet
from picture import draw
from transports import TRANSPORTS, by_network
from two_hosts import Place, check_two_hosts, two_hosts

import ldt
from ldt.cli.units import bandwidth

__all__ = ["Report", "Row", "column", "in_ranks", "parse", "parser", "run"]

TIMEOUT = timedelta(seconds=120)  # for any collective operation


class Row(Protocol):
    """A frozen dataclass. Fields made by ``column`` appear in the table; the others only in the JSON file."""

    @property
    def wrong(self) -> int:
        """Return the number of incorrect elements over all ranks."""


def column(title: str, spec: str) -> Any:
    """A field with a title and a format, such as ``">10.1f"``. Its value is None where it does not apply."""
    return field(metadata={"title": title, "spec": spec})


# -- options -----------------------------------------------------------------------------------------------------


def parser(description: str, transports: bool = True) -> argparse.ArgumentParser:
    """Add the options that every benchmark has; ``--transports`` only if lanes carry what is measured."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    options.add_argument("--plot", type=Path, metavar="FILE", help="also draw the rows (needs matplotlib)")
    options.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU for each rank"
    )
    options.add_argument(
        "--stacks-after",
        type=float,
        metavar="SECONDS",
        help="if it is not done by then, show where every rank stands, and go on",
    )
    options.add_argument(
        "--link",
        type=bandwidth,
        metavar="RATE",
        help="the edge in one network namespace and the rest in another, as on two hosts, with cards of so much in "
        "between, such as 1Gbit (Linux, as root, with pyroute2; see two_hosts.py)",
    )
    if transports:
        options.add_argument(
            "--transports",
            nargs="+",
            choices=TRANSPORTS["cuda"],
            help="of lanes; default: all that can be on the device, without those that cannot be connected",
        )
    return options


def parse(
    options: argparse.ArgumentParser,
    ranks: Callable[[argparse.Namespace], int],
    edge: Callable[[argparse.Namespace], int] = lambda _: 1,
) -> argparse.Namespace:
    """Parse the arguments, and choose a device that has enough GPUs for ``ranks``, the first ``edge`` on the edge."""
    given = options.parse_args()
    given.ranks, given.edge = ranks(given), edge(given)
    gpus = torch.cuda.device_count()
    if given.device is None:
        given.device = "cuda" if gpus >= given.ranks else "cpu"
    elif given.device == "cuda" and gpus < given.ranks:
        options.error(
            f"--device cuda: expected {given.ranks} GPUs, one for each rank, got {gpus}: "
            "ask for fewer ranks, or give --device cpu"
        )
    if given.link:
        try:
            check_two_hosts(given.ranks, given.edge, given.link)
            given.transports = by_network(given)
        except ValueError as error:
            options.error(f"--link: {error}")
    return given


# -- ranks -------------------------------------------------------------------------------------------------------


def run(measure: Callable[[Any], Iterable[Row]], arguments: argparse.Namespace, context: str) -> int:
    """Run ``measure(arguments)`` on all ranks, report rank 0's rows as they arrive, and return the exit code.

    With ``--device cuda`` each rank uses the GPU of its number, with both gloo and NCCL.
    """
    hosts: AbstractContextManager[list[Place]] = nullcontext([])
    if arguments.link:
        hosts = two_hosts(arguments.ranks, arguments.edge, arguments.link)
    with tempfile.TemporaryDirectory() as folder, hosts as places:
        _start(_report_from_rank, (folder, measure, arguments, context, places), arguments.ranks)
        return 1 if int((Path(folder) / "wrong").read_text()) else 0


def in_ranks(
    function: Callable[..., Any], inputs: Sequence[object], ranks: int, places: Sequence[Place] = ()
) -> Any:
    """Run ``function(*inputs)`` in fresh processes over gloo, each in its place. Returns what rank 0 returns."""
    with tempfile.TemporaryDirectory() as folder:
        _start(_return_from_rank, (folder, function, inputs, ranks, places), ranks)
        return pickle.loads((Path(folder) / "returned").read_bytes())


def _start(function: Callable[..., None], inputs: Sequence[object], ranks: int) -> None:
    # Imported once, not on each rank. Not ldt: the fork server searches the current folder first, which may be the
    # source tree.
    multiprocessing.set_forkserver_preload(["torch.distributed"])
    mp.start_processes(function, tuple(inputs), nprocs=ranks, start_method="forkserver")  # type: ignore


def _join(rank: int, ranks: int, folder: str, places: Sequence[Place], backend: str = "gloo") -> None:
    """Enter this rank's place and the default group."""
    if places:
        places[rank].enter()
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=TIMEOUT)


def _return_from_rank(
    rank: int,
    folder: str,
    function: Callable[..., Any],
    inputs: Sequence[object],
    ranks: int,
    places: Sequence[Place],
) -> None:
    _join(rank, ranks, folder, places)
    returned = function(*inputs)
    if rank == 0:
        (Path(folder) / "returned").write_bytes(pickle.dumps(returned))
    meet()
    dist.destroy_process_group()


def _report_from_rank(
    rank: int,
    folder: str,
    measure: Callable[[Any], Iterable[Row]],
    arguments: argparse.Namespace,
    context: str,
    places: Sequence[Place],
) -> None:
    if arguments.stacks_after:
        faulthandler.dump_traceback_later(arguments.stacks_after)
    backend = "gloo"
    if arguments.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"  # measurements are compared over gloo
    _join(rank, arguments.ranks, folder, places, backend)
    report = Report(arguments, context, talks=rank == 0)
    try:
        for row in measure(arguments):
            report.add(row)
    finally:
        report.write()
    if rank == 0:
        (Path(folder) / "wrong").write_text(str(report.wrong))
    meet()
    dist.destroy_process_group()


# -- rows --------------------------------------------------------------------------------------------------------


class Report:
    """Prints rows, with a header whenever their type changes, and writes the requested files."""

    def __init__(self, arguments: argparse.Namespace, context: str, talks: bool = True) -> None:
        self._arguments = arguments
        self._talks = talks
        self._rows: list[Any] = []
        self._notes = [f"# {context}", _where(arguments)]
        if talks:
            print("\n".join(self._notes), flush=True)

    @property
    def wrong(self) -> int:
        return sum(row.wrong for row in self._rows)

    def add(self, row: Row) -> None:
        if self._talks:
            if not self._rows or type(self._rows[-1]) is not type(row):
                print(_head(row), flush=True)
            print(_line(row), flush=True)
        self._rows.append(row)

    def write(self) -> None:
        if not self._talks:
            return
        if self._arguments.json:
            rows = [{"table": type(row).__name__, **asdict(row)} for row in self._rows]
            self._arguments.json.write_text(json.dumps({"context": self._notes, "rows": rows}, indent=1))
        if self._arguments.plot:
            draw(self._rows, self._arguments.plot)


def _where(arguments: argparse.Namespace) -> str:
    text = (
        f"# ldt {ldt.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores ({platform.machine()}), {arguments.ranks} processes"
    )
    if arguments.device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        text += f", {arguments.ranks} × {torch.cuda.get_device_name()}, NCCL {nccl}"
    if arguments.link:
        rate = arguments.link * 8e-9
        text += f", {arguments.edge} of the ranks in another network namespace, cards of {rate:g} Gb/s"
    return text


def _columns(row: Row) -> list[tuple[str, str, Any]]:
    """Return the title, format and value of each column."""
    return [
        (part.metadata["title"], part.metadata["spec"], getattr(row, part.name))
        for part in fields(row)  # type: ignore[arg-type]
        if part.metadata
    ]


def _head(row: Row) -> str:
    text = " ".join(format(title, _width(spec)) for title, spec, _ in _columns(row))
    return f"# {text}"


def _line(row: Row) -> str:
    cells = (
        format("-", _width(spec)) if value is None else format(value, spec)
        for _, spec, value in _columns(row)
    )
    return f"  {' '.join(cells)}"


def _width(spec: str) -> str:
    """Return the format for text that matches a number's: ``">10"`` for ``">10.1f"``."""
    found = re.match("[<>][0-9]+", spec)
    assert found is not None, spec
    return found[0]
