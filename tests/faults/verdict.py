"""Checks what every rank reports after a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from faults.fault import QUIET, SAVE_EVERY, STEPS, Fault
from faults.injection import EXIT_CODE, HEARTBEAT_SECONDS
from faults.job import Raised, Report
from faults.worker_pool import Ending, Injected
from ldt.testing import in_time

__all__ = [
    "CLOSE_SECONDS",
    "complaints",
    "quiet",
    "repeated_steps",
    "resumption_complaints",
    "seconds_until_raised",
    "unlike",
    "words",
]

RAISE_SECONDS = 5.0
CLOSE_SECONDS = 5.0
_EXIT_CODES = {"kill": -9, "exit": EXIT_CODE}
_OWN_ERRORS = {"exception": "InjectedError", "memory": "OutOfMemoryError"}


def complaints(
    fault: Fault, injected: Sequence[Injected], endings: Sequence[Ending], reference: Sequence[Report]
) -> Iterator[str]:
    """Yield what is wrong with a disturbed run, in words."""
    if not injected:
        yield "the fault was not injected: the job did not reach its point"
    for rank, ending in enumerate(endings):
        for text in _of_rank(fault, rank, ending, reference[rank]):
            yield f"rank {rank}: {text}"
    seconds = seconds_until_raised(fault, injected, endings)
    limit = RAISE_SECONDS + (HEARTBEAT_SECONDS if fault.kind == "stop" else 0.0)
    if seconds is not None and not in_time(seconds, limit):
        yield f"the last rank raised after {seconds:.2f} s, expected at most {limit:g} s"


def seconds_until_raised(
    fault: Fault, injected: Sequence[Injected], endings: Sequence[Ending]
) -> float | None:
    """Return the seconds from the fault to the last rank that raised; None if none did. Ignores a stopped rank."""
    times = [
        raised.time
        for rank, report in _reports(endings)
        if (raised := report.refused or report.failure) is not None
        and not (fault.kind == "stop" and rank == fault.rank)
    ]
    return max(times) - injected[0].time if times and injected else None


def resumption_complaints(
    endings: Sequence[Ending], again: Sequence[Ending], reference: Sequence[Report]
) -> Iterator[str]:
    """Yield what is wrong with a run that resumes from the last checkpoint of ``endings``."""
    saved = max((max(report.saved, default=0) for _, report in _reports(endings)), default=0)
    tried = max((max(report.tried, default=0) for _, report in _reports(endings)), default=0)
    for rank, ending in enumerate(again):
        if not isinstance(ending.answer, Report):
            yield f"rank {rank}, resumed, did not answer: {words(ending)}"
            continue
        report = ending.answer
        if report.failure is not None:
            yield f"rank {rank}, resumed, raised:\n{report.failure.trace}"
        elif not saved <= (report.loaded or 0) <= max(saved, tried):
            yield f"rank {rank}, resumed, loaded step {report.loaded}; saved was {saved}, begun {tried}"
        else:
            for text in unlike(report, reference[rank]):
                yield f"rank {rank}, resumed from step {report.loaded}: {text}"
        if report.leaked:
            yield f"rank {rank}, resumed, leaked: {', '.join(report.leaked)}"


def repeated_steps(endings: Sequence[Ending], again: Sequence[Ending]) -> int:
    """Return how many steps are repeated because they were not saved."""
    done = max((report.done for _, report in _reports(endings)), default=0)
    loaded = min((report.loaded or 0 for _, report in _reports(again)), default=0)
    return done - loaded


def _of_rank(fault: Fault, rank: int, ending: Ending, reference: Report) -> Iterator[str]:
    if rank == fault.rank and fault.kind in _EXIT_CODES:
        if ending.exit_code != _EXIT_CODES[fault.kind]:
            yield f"should have ended with exit code {_EXIT_CODES[fault.kind]}: {words(ending)}"
        return
    report = ending.answer
    if not isinstance(report, Report):
        yield f"did not answer: {words(ending)}"
        return
    if report.leaked:
        yield f"leaked: {', '.join(report.leaked)}"
    if fault.kind in QUIET or fault.kind == "disk_full":
        yield from unlike(report, reference)
    if fault.kind in QUIET:
        yield from quiet(report)
    elif fault.kind == "disk_full":
        yield from _refused(fault, rank, report)
    else:
        yield from _failed(fault, rank, report)


def quiet(report: Report) -> Iterator[str]:
    """Yield what the rank raised."""
    if report.failure is not None:
        yield f"nothing should be raised:\n{report.failure.trace}"


def _refused(fault: Fault, rank: int, report: Report) -> Iterator[str]:
    """The save must fail on all ranks, and training continue."""
    yield from quiet(report)
    if report.refused is None:
        yield "the save to a full disk should have raised"
        return
    yield from _wrong_error(fault, rank, report.refused)
    expected = [step for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY) if step != fault.step + 1]
    if report.saved != expected:
        yield f"saved steps {report.saved}, expected {expected}"


def _failed(fault: Fault, rank: int, report: Report) -> Iterator[str]:
    if report.failure is None:
        yield f"should have raised; did {report.done} steps"
        return
    yield from _wrong_error(fault, rank, report.failure)
    if not in_time(report.closed - report.failure.time, CLOSE_SECONDS):
        yield f"closing took {report.closed - report.failure.time:.1f} s, expected at most {CLOSE_SECONDS:g} s"


def _wrong_error(fault: Fault, rank: int, raised: Raised) -> Iterator[str]:
    expected, is_right = _right_error(fault, rank)
    if not is_right(raised):
        yield f"expected {expected}, got one of rank {raised.rank} ({raised.cause}):\n{raised.trace}"


def _right_error(fault: Fault, rank: int) -> tuple[str, Callable[[Raised], bool]]:
    """Return the expected error, in words and as a test: the rank's own, or a RemoteStageError naming the rank."""
    if fault.kind == "corrupt":  # any rank may detect it
        return "an error of ldt", lambda raised: raised.ours
    if fault.kind == "drop":  # the layers of the model may use the connection, too
        return "an error of ldt or of gloo", lambda raised: raised.ours or "gloo" in raised.text
    if fault.kind == "disk_full":
        return f"that the disk of rank {fault.rank} is full", lambda raised: _is_full_disk(
            fault, rank, raised
        )
    own = _OWN_ERRORS.get(fault.kind)
    if rank != fault.rank:
        return (
            f"RemoteStageError of rank {fault.rank} ({own or 'whatever'})",
            lambda raised: raised.remote and raised.rank == fault.rank and own in (None, raised.cause),
        )
    if own is None:  # it was stopped, and learns of the failure when it continues
        return "an error of ldt", lambda raised: raised.ours
    return own, lambda raised: raised.kind == own


def _is_full_disk(fault: Fault, rank: int, raised: Raised) -> bool:
    """Whether it is the full disk's error; on other ranks its text must name the rank."""
    if rank == fault.rank:
        return not raised.remote
    return raised.rank == fault.rank or f"rank {fault.rank} cannot write" in raised.text


def unlike(report: Report, reference: Report) -> Iterator[str]:
    """Yield the steps after which weights differ from the undisturbed run."""
    steps = [step for step, digest in report.digests.items() if digest != reference.digests[step]]
    if steps:
        yield f"its weights differ from those of an undisturbed run after steps {steps}"
    if report.done != STEPS:
        yield f"did {report.done} steps, expected {STEPS}"


def _reports(endings: Sequence[Ending]) -> list[tuple[int, Report]]:
    return [(rank, end.answer) for rank, end in enumerate(endings) if isinstance(end.answer, Report)]


def words(ending: Ending) -> str:
    """Describe the ending of a rank that did not answer."""
    if ending.stack is not None:
        return f"it hung at\n{ending.stack}"
    return f"{ending.answer}" if ending.answer is not None else f"it died with exit code {ending.exit_code}"
