"""Runs the job with the fault of a seed, then again from the last checkpoint, and judges what the ranks report."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from faults.crew import Crew, Ending
from faults.fault import SHAPES, Fault, draw
from faults.job import Order, Report, train
from faults.judgement import complaints, repeated_steps, resumption_complaints, seconds_until_raised
from ldt.topology import Topology

__all__ = ["SHARED_MEMORY", "FaultError", "Harness", "Outcome", "left_files"]

_HANG_SECONDS = 40.0  # by then the job is killed; what is expected of a fault is a matter of the judgement
SHARED_MEMORY = Path("/dev/shm")
_SETTLING_SECONDS = 2.0


class FaultError(AssertionError):
    """Something was not as it should be after a fault. The text begins with the seed and the fault."""


@dataclass
class Outcome:
    """Of one seed: seconds until the last rank raised (None if none should), steps to be done again, complaints."""

    fault: Fault
    seconds: float | None = None
    repeated: int = 0
    complaints: list[str] = field(default_factory=list)

    def check(self) -> None:
        if self.complaints:
            raise FaultError(f"{self.fault}\n" + "\n".join(self.complaints))


class Harness:
    """A crew that is used for many seeds. A context manager."""

    def __init__(self) -> None:
        self._crew = Crew(max(shape.world_size for shape in SHAPES))
        self._worlds = 0
        self._undisturbed: dict[Topology, list[Report]] = {}

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *unused: object) -> None:
        self._crew.__exit__()

    def run(self, seed: int) -> Outcome:
        """What came of the fault of a seed."""
        fault = draw(seed)
        reference = self._reference(fault.topology)
        shared_before = set(SHARED_MEMORY.iterdir())
        outcome = Outcome(fault)
        with tempfile.TemporaryDirectory(prefix="ldt-faults-") as folder:
            endings = self._job(fault.topology, Path(folder), fault)
            injected = self._crew.injected
            outcome.complaints += complaints(fault, injected, endings, reference)
            outcome.seconds = seconds_until_raised(fault, injected, endings)
            again = self._job(fault.topology, Path(folder))
            outcome.complaints += resumption_complaints(endings, again, reference)
            outcome.repeated = repeated_steps(endings, again)
        outcome.complaints += [f"left in shared memory: {path}" for path in left_files(shared_before)]
        return outcome

    def _reference(self, topology: Topology) -> list[Report]:
        """The reports of a run that nothing disturbs."""
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
        return self._crew.run(train, [order] * topology.world_size, _HANG_SECONDS)


def left_files(before: set[Path]) -> list[Path]:
    """New files in shared memory that do not go within a while, and are not another program's."""
    deadline = time.monotonic() + _SETTLING_SECONDS
    while left := set(SHARED_MEMORY.iterdir()) - before:
        if time.monotonic() > deadline:
            return sorted(left - _of_other_programs())
        time.sleep(0.02)
    return []


def _of_other_programs() -> set[Path]:
    """Files in shared memory that living processes outside of this process group have mapped."""
    files = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if os.getpgid(int(maps.parent.name)) != os.getpgrp():
                paths = (line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines())
                files |= {Path(path) for path in paths if path.startswith(f"{SHARED_MEMORY}/")}
        except (OSError, ValueError):  # it has ended, or is not ours to look at
            continue
    return files
