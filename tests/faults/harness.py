"""Runs the job with the fault of a seed, then resumes from the last checkpoint, and checks the ranks' reports."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from faults.fault import SHAPES, Fault, draw
from faults.job import Order, Report, train
from faults.verdict import complaints, repeated_steps, resumption_complaints, seconds_until_raised
from faults.worker_pool import Ending, WorkerPool
from ldt.topology import Topology

__all__ = ["SHARED_MEMORY", "FaultError", "Harness", "Outcome", "left_files"]

_HANG_SECONDS = 40.0  # then the job is killed; the limits per fault are in faults.verdict
SHARED_MEMORY = Path("/dev/shm")
_SETTLING_SECONDS = 2.0
# Locks of multiprocessing, of which ldt has none. Those of a rank that was killed stay until its parent ends.
_SEMAPHORE = "sem."


class FaultError(AssertionError):
    """A check failed after a fault. The text begins with the seed and the fault."""


@dataclass
class Outcome:
    """The outcome of a seed: seconds until the last rank raised (None if none did), steps to repeat, complaints."""

    fault: Fault
    seconds: float | None = None
    repeated: int = 0
    complaints: list[str] = field(default_factory=list)

    def check(self) -> None:
        if self.complaints:
            raise FaultError(f"{self.fault}\n" + "\n".join(self.complaints))


class Harness:
    """Runs many seeds on one pool of workers. A context manager."""

    def __init__(self) -> None:
        self._pool = self._make_pool()
        self._worlds = 0
        self._undisturbed: dict[Topology, list[Report]] = {}

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *unused: object) -> None:
        self._pool.__exit__()

    def _make_pool(self) -> WorkerPool:
        return WorkerPool(max(shape.world_size for shape in SHAPES))

    def draw(self, seed: int) -> Fault:
        return draw(seed)

    def complaints(self, fault: Fault, endings: list[Ending], reference: list[Report]) -> Iterable[str]:
        """Return what is wrong with a disturbed run, in words."""
        return complaints(fault, self._pool.injected, endings, reference)

    def run(self, seed: int) -> Outcome:
        """Run the fault of a seed."""
        fault = self.draw(seed)
        reference = self._reference(fault.topology)
        shared_before = set(SHARED_MEMORY.iterdir())
        outcome = Outcome(fault)
        with tempfile.TemporaryDirectory(prefix="ldt-faults-") as folder:
            endings = self._job(fault.topology, Path(folder), fault)
            outcome.complaints += self.complaints(fault, endings, reference)
            outcome.seconds = seconds_until_raised(fault, self._pool.injected, endings)
            again = self._job(fault.topology, Path(folder))
            outcome.complaints += resumption_complaints(endings, again, reference)
            outcome.repeated = repeated_steps(endings, again)
        outcome.complaints += [f"left in shared memory: {path}" for path in left_files(shared_before)]
        return outcome

    def _reference(self, topology: Topology) -> list[Report]:
        """Return the reports of an undisturbed run."""
        if topology not in self._undisturbed:
            with tempfile.TemporaryDirectory(prefix="ldt-faults-") as folder:
                endings = self._job(topology, Path(folder))
            reports = [ending.answer for ending in endings if isinstance(ending.answer, Report)]
            if len(reports) < len(endings) or any(report.failure is not None for report in reports):
                raise FaultError(f"a run of {topology.to_text()} without a fault failed: {endings}")
            self._undisturbed[topology] = reports
        return self._undisturbed[topology]

    def _job(self, topology: Topology, folder: Path, fault: Fault | None = None) -> list[Ending]:
        self._worlds += 1
        order = Order(f"world-{self._worlds}", topology, folder, fault)
        return self._pool.run(train, [order] * topology.world_size, _HANG_SECONDS)


def left_files(before: set[Path], folder: Path = SHARED_MEMORY) -> list[Path]:
    """Return new files of ``folder`` that stay, unless a program that is none of ours has mapped them."""
    deadline = time.monotonic() + _SETTLING_SECONDS
    while left := {path for path in folder.iterdir() if not path.name.startswith(_SEMAPHORE)} - before:
        if time.monotonic() > deadline:
            left -= _of_other_programs(folder)
            return sorted(left & set(folder.iterdir()))  # those whose program has just ended are gone
        time.sleep(0.02)
    return []


def _of_other_programs(folder: Path) -> set[Path]:
    """Return files of ``folder`` that processes have mapped, except this one and its descendants in its group."""
    files = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not _is_ours(int(process.name)):
                paths = (line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines())
                files |= {Path(path) for path in paths if path.startswith(f"{folder}/")}
        except (OSError, ValueError):  # it has ended, or access is denied
            continue
    return files


def _is_ours(process: int) -> bool:
    if os.getpgid(process) != os.getpgrp():
        return False
    while process not in (0, os.getpid()):
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])  # its parent
    return process == os.getpid()
