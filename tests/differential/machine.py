"""Runs jobs in pools of ranks, many on one mesh, and compares them with the unsplit model."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby, islice
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from differential.compare import Verdict, compare
from differential.job import Ending, run_jobs
from differential.reference import reference
from differential.spec import Job
from ldt.testing import RankError, RankPool

__all__ = ["Machine", "Outcome"]

_BATCH = 12  # jobs on one mesh
_BASE_SECONDS, _JOB_SECONDS = 30.0, 3.0  # a batch's deadline; a single job's is that of a batch of one


class Outcome(NamedTuple):
    """A job and its verdict."""

    job: Job
    verdict: Verdict


class Machine:
    """A pool for each number of ranks. A context manager."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}
        self._open = ExitStack()
        self._folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="ldt-differential-")))
        self._runner = self._open.enter_context(ThreadPoolExecutor(1))
        self._runs = 0

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def run(self, jobs: Iterable[Job], mutant: str = "") -> Iterator[Outcome]:
        """Return the outcomes of all jobs, grouped by mesh, with the ``mutant`` of that name applied in the ranks."""
        ordered = sorted(jobs, key=lambda job: repr(job.mesh_config))
        for _, alike in groupby(ordered, key=lambda job: job.mesh_config):
            while batch := list(islice(alike, _BATCH)):
                yield from self._run_batch(batch, mutant)

    def run_one(self, job: Job) -> Verdict:
        """Run one job alone."""
        return next(self._run_batch([job])).verdict

    def _run_batch(self, jobs: Sequence[Job], mutant: str = "") -> Iterator[Outcome]:
        running = self._runner.submit(self._on_ranks, jobs, mutant)
        expected = [_expected(job) for job in jobs]
        by_rank = running.result()
        if isinstance(by_rank, RankError):
            yield from self._run_apart(jobs, expected, by_rank, mutant)
            return
        for job, endings, right in zip(jobs, zip(*by_rank, strict=True), expected, strict=True):
            yield Outcome(job, compare(job, endings, right))

    def _run_apart(
        self, jobs: Sequence[Job], expected: Sequence[Any], error: RankError, mutant: str
    ) -> Iterator[Outcome]:
        """Run the jobs one by one after a hang or a crash, to find the one that caused it."""
        if len(jobs) == 1:
            late = "were not done after" in str(error)
            name = "a rank hangs" if late else "a rank dies or cannot connect"
            kind = "invalid" if isinstance(expected[0], Exception) and not late else "finding"
            yield Outcome(jobs[0], Verdict(kind, name, str(error)))
            return
        for job in jobs:
            yield from self._run_batch([job], mutant)

    def _on_ranks(self, jobs: Sequence[Job], mutant: str) -> list[list[Ending]] | RankError:
        self._runs += 1
        size = jobs[0].topology.world_size
        folder = self._folder / str(self._runs)
        folder.mkdir()
        if size not in self._pools:
            self._pools[size] = self._open.enter_context(RankPool(size))
        try:
            limit = _BASE_SECONDS + _JOB_SECONDS * len(jobs)
            return self._pools[size].run(run_jobs, list(jobs), folder, mutant, timeout=limit)
        except RankError as error:
            return error


def _expected(job: Job) -> Any:
    """Return the reference's records, or the exception that it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return reference(job)
        except Exception as error:
            return error
