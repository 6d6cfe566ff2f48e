"""Records some steps of a run on each rank, and gathers them on the edge into one trace."""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ldt.runtime.common.peer_messages import plain
from ldt.runtime.common.redact import InputTypeError, InputValueError
from ldt.runtime.execution.profile_trace import profile_trace
from ldt.runtime.execution.step_result import StepStats
from ldt.runtime.execution.stream_timer import StreamTimer
from ldt.runtime.mesh.mesh import Mesh
from ldt.site import Site
from ldt.topology import Node

__all__ = ["Profile", "Profiler", "check_profile"]

logger = logging.getLogger(__name__)

_MOST_STEPS = 100
_ROUND_TRIPS = 5  # of which the fastest counts
_TRACE = "trace.json"


@dataclass(frozen=True)
class Profile:
    """The steps of a pipeline to record, and the folder for what is recorded: ``Pipeline(profile=...)``.

    After the last of ``steps``, rank 0 writes ``trace.json``: a Chrome trace with all actions and transfers of all
    ranks. With ``kernels`` each rank writes what ``torch.profiler`` recorded of it to ``kernels-<rank>.json.gz``, which
    ``python -m ldt trace --merge`` adds to the trace.

    Attributes:
        folder: Made if it is not there. May differ by rank.
        steps: For example ``range(10, 13)``. The pipeline's first step is 0; evals and ``measure_costs`` do not count.
            The edge decides; ranks of the cloud have the same, or no profile, and then record their actions alone.
        kernels: Record operators and kernels of this rank, too, which takes time in each of them.
    """

    folder: str | os.PathLike[str]
    steps: range
    kernels: bool = True


def check_profile(profile: Profile) -> list[int]:
    """Make the folder. Returns the first step and the one after the last. Raises ValueError, TypeError or OSError."""
    if not isinstance(profile, Profile):
        raise InputTypeError(f"profile must be an ldt.Profile, got {type(profile).__name__}")
    steps = profile.steps
    contiguous = isinstance(steps, range) and steps.step == 1 and steps.start >= 0
    if not contiguous or not 1 <= len(steps) <= _MOST_STEPS:
        raise InputValueError(
            f"steps of a profile must be a range of 1 to {_MOST_STEPS} steps such as range(10, 13), got "
            f"{str(steps)[:80]}"
        )
    Path(profile.folder).mkdir(parents=True, exist_ok=True)
    return [steps.start, steps.stop]


class Profiler:
    """Records ``steps`` on this rank, and writes to the folder of ``profile`` if this rank has one."""

    def __init__(self, mesh: Mesh, steps: range, profile: Profile | None) -> None:
        self._steps = steps
        self._folder = Path("" if profile is None else profile.folder)
        self._kernels = profile is not None and bool(profile.kernels)
        self._mesh = mesh
        self._step = 0
        self._recorded: list[StepStats] = []
        self._torch: torch.profiler.profile | None = None
        self._at_end: Any = None

    def begin_step(self) -> StreamTimer | None:
        """Begin a step. Returns what times it on the device, if it is recorded and there is one."""
        if self._step not in self._steps:
            return None
        self._start()
        return None if self._mesh.device.type == "cpu" else StreamTimer(self._mesh.device, moments=True)

    def end_step(self, stats: StepStats) -> bool:
        """End a step that succeeded. Returns whether all is recorded and written: with the last of the steps.

        A collective call of all ranks then.
        """
        if self._step in self._steps:
            self._recorded.append(stats)
        self._step += 1
        if self._step == self._steps.start:
            self._start()  # takes long the first time, so not within a step
        if self._step < self._steps.stop:
            return False
        self._stop()
        self._gather()
        return True

    def abort(self) -> None:
        """Stop recording, as the mesh has failed."""
        if self._torch is not None:
            self._at_end.detach()
            _stop_early(self._torch)
            self._torch = None

    # -- kernels ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._kernels or self._torch is not None:
            return
        self._torch = torch.profiler.profile(
            activities=torch.profiler.supported_activities(),  # type: ignore[no-untyped-call]
            acc_events=True,
        )
        try:
            self._torch.start()
        except RuntimeError as error:  # such as another profiler that runs
            self._torch, self._kernels = None, False
            logger.warning("kernels are not recorded: %s", error)
            return
        # A process that exits while torch records is killed by SIGSEGV.
        self._at_end = weakref.finalize(self, _stop_early, self._torch, "it ended before its last step")

    def _stop(self) -> None:
        """Write what torch recorded."""
        if self._torch is None:
            return
        self._at_end.detach()
        path = self._folder / f"kernels-{self._mesh.rank}.json.gz"
        try:
            self._torch.add_metadata_json("ldt", json.dumps({"rank": self._mesh.rank}))
            self._torch.stop()
            self._torch.export_chrome_trace(str(path))
            logger.info("wrote the kernels of this rank to %s", path)
        except (OSError, RuntimeError) as error:
            logger.warning("the kernels of this rank could not be written to %s: %s", path, error)
        self._torch = None

    # -- records ---------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Bring the records of all ranks to rank 0, which writes the trace."""
        mesh = self._mesh
        ahead = _clocks(mesh)
        mine = [stats.to_json() for stats in self._recorded]
        gathered = mesh.control.gather(mine, lambda found: [StepStats.from_json(one) for one in found])
        if mesh.rank != 0:
            return
        path = self._folder / _TRACE
        try:
            records = [
                [replace(stats, topology=mesh.topology, rank=rank) for stats in found]
                for rank, found in enumerate(gathered)
            ]
            clocks = [ahead.get(mesh.rank_info.site_of(rank), 0.0) for rank in mesh.ranks]
            path.write_text(json.dumps(profile_trace(records, self._steps, clocks)), encoding="utf-8")
            logger.info("wrote the profile of all ranks to %s", path)
        except Exception as error:  # a disk that is full must not end the training
            logger.warning("the profile of all ranks could not be written to %s: %s", path, plain(str(error)))


def _stop_early(torch_profiler: torch.profiler.profile, reason: str = "") -> None:
    """Stop recording, and log the ``reason`` why the profile is not written."""
    with suppress(RuntimeError):
        torch_profiler.stop()
    if reason:
        logger.warning("the profile was not written: %s", reason)


def _clocks(mesh: Mesh) -> dict[Site, float]:
    """On rank 0, by how many seconds the clock of each other site is ahead, as the fastest of some round trips says.

    A collective call of all ranks.
    """
    ahead: dict[Site, float] = {}
    first = {site: Node(stage, 0) for stage, site in reversed([*enumerate(mesh.topology.sites)][1:])}
    for site, node in first.items():
        trips = []
        for _ in range(_ROUND_TRIPS):
            before, start = time.time(), time.perf_counter()
            mesh.control.broadcast(None, Node(0, 0))
            theirs = mesh.control.broadcast(time.time(), node, float)
            seconds = time.perf_counter() - start
            trips.append((seconds, theirs - before - seconds / 2))
        ahead[site] = min(trips)[1]
    return ahead
