"""Checks what every rank reports after a fault of the link between two sites."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from faults.fault import Fault
from faults.injection import HEARTBEAT_SECONDS
from faults.job import CONNECT_SECONDS, Report
from faults.verdict import CLOSE_SECONDS, quiet, seconds_until_raised, unlike, words
from faults.worker_pool import Ending, Injected
from ldt.testing import in_time

__all__ = ["link_complaints"]

_STORE_SECONDS = 10.0  # the shortest time without an answer after which the store counts as lost
_RAISE_SECONDS = 10.0  # beyond the limits that connect was given
_FIRST = re.compile(r"rank \d+ \(.*?\) failed first")
_WHAT = {"long_outage": "the link", "reset": "connection"}


def link_complaints(
    fault: Fault, injected: Sequence[Injected], endings: Sequence[Ending], reference: Sequence[Report]
) -> Iterator[str]:
    """Yield what is wrong with a disturbed run, in words."""
    if not injected:
        yield "the fault was not injected: the job did not reach its point"
    reports = [ending.answer for ending in endings if isinstance(ending.answer, Report)]
    raised = any(report.failure is not None for report in reports) or fault.kind == "long_outage"
    for rank, ending in enumerate(endings):
        if not isinstance(ending.answer, Report):
            yield f"rank {rank} did not answer: {words(ending)}"
            continue
        for text in _of_report(fault, ending.answer, reference[rank], raised and fault.kind != "outage"):
            yield f"rank {rank}: {text}"
    texts = [report.failure.text for report in reports if report.failure is not None]
    stories = {found[0] for text in texts if (found := _FIRST.search(text))}
    if len(stories) > 1:
        yield f"ranks name different failures: {', '.join(sorted(stories))}"
    seconds = seconds_until_raised(fault, injected, endings)
    limit = max(HEARTBEAT_SECONDS + 2 * fault.outage, _STORE_SECONDS) + _RAISE_SECONDS
    if fault.point == "connect":  # that of connect counts until all ranks have come
        limit = max(limit, CONNECT_SECONDS + 2 * fault.outage + _RAISE_SECONDS)
    if seconds is not None and not in_time(seconds, limit):
        yield f"the last rank raised after {seconds:.2f} s, expected at most {limit:g} s"


def _of_report(fault: Fault, report: Report, reference: Report, raises: bool) -> Iterator[str]:
    """Yield what is wrong on a rank. A reset may hit a connection that is idle, or made again: then nothing raises."""
    if report.leaked:
        yield f"leaked: {', '.join(report.leaked)}"
    if not raises or (report.failure is None and fault.point == "close"):  # which may need the link no more
        yield from quiet(report)
        yield from unlike(report, reference)
    elif report.failure is None:
        yield f"should have raised; did {report.done} steps"
    else:
        yield from _failed(fault, report)


def _failed(fault: Fault, report: Report) -> Iterator[str]:
    assert report.failure is not None
    if not (report.failure.ours and _WHAT[fault.kind] in report.failure.text.lower()):
        yield f"expected an error of ldt that names {_WHAT[fault.kind]!r}, got:\n{report.failure.trace}"
    limit = CLOSE_SECONDS + 2 * fault.outage
    if not in_time(report.closed - report.failure.time, limit):
        yield f"closing took {report.closed - report.failure.time:.1f} s, expected at most {limit:g} s"
