"""Tries one kind of lane: starts two processes, waits for them, and diagnoses the result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import IO, Any

import ldt
from ldt._torch_abi import REBUILD
from ldt.cli.lane_check.kinds import LaneKind
from ldt.cli.lane_check.rank import IMPORT, START

__all__ = ["Trial", "try_lane"]

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 5.0  # for the other rank to report, once one has failed
_START_SECONDS = 300.0  # importing torch may read a gigabyte from a slow disk
# Errors that may only be a consequence of the other rank's failure.
_CONSEQUENCES = ("RemoteStageError", "LaneError", "DistNetworkError")
# The rank imports the same package as this process, whatever its working directory is.
_PROGRAM = """
import json, sys
order = json.loads(sys.argv[1])
sys.path[:] = order["path"]
import ldt
ldt.__path__[:] = order["package"]
from ldt.cli.lane_check.rank import serve
serve(order)
"""
OTHER_RUNTIME = (
    f"rebuild with {REBUILD}, with a compiler that links the libstdc++ that torch loads: unset CXX, CXXFLAGS and "
    "LDFLAGS, or set CXX to the system's own, such as /usr/bin/g++"
)


class Trial:
    """The result of a trial: ``figures`` as text or, if the lane is broken, ``problem`` and ``remedy``."""

    def __init__(self, kind: LaneKind, ranks: list[_Rank], seconds: float) -> None:
        reports = ranks[0].reports
        self.kind = kind
        self.loads = all(rank.phase not in (START, IMPORT) for rank in ranks)
        self.runtimes: list[str] = reports.get("runtimes", [])
        self.figures = reports.get("refused", "")
        if "microseconds" in reports:
            self.figures = f"{reports['microseconds']:.0f} µs, {reports['gigabytes_per_second']:.2g} GB/s"
        self.problem, self.remedy = _diagnose(kind, ranks, seconds)


def try_lane(kind: LaneKind, seconds: float = 60.0) -> Trial:
    """Let two processes of this machine exchange messages over ``kind``.

    They are killed when neither has entered a new phase for ``seconds``; imports, the first phase, may take longer.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented

    with ExitStack() as stack:
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        ranks = [stack.enter_context(_Rank(kind, rank, store.port)) for rank in range(2)]
        _wait(ranks, seconds)
        return Trial(kind, ranks, seconds)


class _Rank:
    """A process of a trial. The context manager kills it."""

    def __init__(self, kind: LaneKind, rank: int, port: int) -> None:
        self.rank = rank
        self.late = False
        order = {
            **kind._asdict(),
            "rank": rank,
            "port": port,
            "path": sys.path,
            "package": list(ldt.__path__),
        }
        self._files = [tempfile.TemporaryFile("a+") for _ in range(2)]  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(order)],
            stdin=subprocess.PIPE,  # read by the rank, which ends when this process does
            stdout=self._files[0],
            stderr=self._files[1],
            env={"OMP_NUM_THREADS": "1", **os.environ, **kind.environment[rank]},
        )

    def __enter__(self) -> _Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        for file in self._files:
            file.close()

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    @property
    def phase(self) -> str:
        """The phase that it entered last."""
        return str(self.reports.get("phase", START))

    @property
    def reports(self) -> dict[str, Any]:
        """Everything it has reported, merged; later values win."""
        merged: dict[str, Any] = {}
        lines, _, _ = _written(self._files[0]).rpartition("\n")  # the rank may be writing the next one
        for line in lines.splitlines():
            if line.startswith("{"):
                merged |= json.loads(line)
        return merged

    def last_words(self) -> str:
        """The last line on standard error."""
        lines = _written(self._files[1]).strip().splitlines()
        return lines[-1] if lines else ""


def _written(file: IO[str]) -> str:
    """What is in ``file``. Reads past its position, which the rank that writes to it shares."""
    handle = file.fileno()
    return os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="replace")


def _wait(ranks: list[_Rank], seconds: float) -> None:
    """Wait until both have ended, neither makes progress, or one has failed and the other had time to report."""
    phases = ["", ""]
    failed = False
    deadline = 0.0
    while any(rank.status is None for rank in ranks):
        if not failed and phases != [rank.phase for rank in ranks]:
            phases = [rank.phase for rank in ranks]
            starting = any(phase in (START, IMPORT) for phase in phases)
            deadline = time.monotonic() + (_START_SECONDS if starting else seconds)
        if not failed and any(rank.status for rank in ranks):
            failed = True
            deadline = time.monotonic() + _GRACE_SECONDS
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    for rank in ranks:
        rank.late = rank.status is None and not failed


def _diagnose(kind: LaneKind, ranks: list[_Rank], seconds: float) -> tuple[str | None, str | None]:
    """Problem and remedy of the rank whose failure explains the other's; both None if nothing failed."""
    for rank in ranks:
        problem = rank.reports.get("runtime_problem")
        if problem:
            return problem, OTHER_RUNTIME
    failures = [rank for rank in ranks if rank.late or rank.status != 0]
    if not failures:
        return None, None
    cause = min(failures, key=_likelihood)
    subject = f"rank {cause.rank}, in {cause.phase!r},"
    if cause.late:
        limit = _START_SECONDS if any(rank.phase in (START, IMPORT) for rank in ranks) else seconds
        return f"{subject} made no progress for {limit:g} s", kind.remedy
    if cause.status is not None and cause.status < 0:
        name = signal.Signals(-cause.status).name
        return f"{subject} was killed by {name}", f"rebuild with {REBUILD}; if it remains, {kind.remedy}"
    error = cause.reports.get("error") or cause.last_words()
    if cause.phase == IMPORT:
        remedy = OTHER_RUNTIME if _is_link_error(error) else f"rebuild with {REBUILD}"
        return f"`{IMPORT}` fails: {error}", remedy
    return f"{subject} failed: {error}", kind.remedy


def _likelihood(rank: _Rank) -> tuple[bool, bool, bool]:
    """Sort the likely cause first: a rank killed by a signal, or with an error that is not about the other rank."""
    signalled = rank.status is not None and rank.status < 0
    error = rank.reports.get("error", "")
    return rank.late, not signalled, error.startswith(_CONSEQUENCES)


def _is_link_error(error: str) -> bool:
    """Whether the loader missed a symbol of another C++ library."""
    return any(word in error for word in ("GLIBCXX_", "CXXABI_", "_ZNSt", "_ZSt", "libc++", "GCC_"))
