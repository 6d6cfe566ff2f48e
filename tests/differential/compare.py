"""Compares the outcome of a job: equal, refused with a known error on every rank, or a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from differential.differences import differences, is_exact
from differential.job import Ending, Raised
from differential.known import MUST_REFUSE, REFUSALS
from differential.reference import Records
from differential.spec import Job
from ldt.topology import Node

__all__ = ["Verdict", "compare"]


@dataclass(frozen=True)
class Verdict:
    """``kind`` is "equal", "refused", "finding", or "invalid" if the unsplit model raises as well.

    ``name`` identifies the outcome within its kind; ``text`` has the details.
    """

    kind: str
    name: str
    text: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind == "finding"

    @property
    def family(self) -> str:
        """The part of the name that stays while a job shrinks, whichever value is the first to differ."""
        return "differs" if self.name.startswith("differs") else self.name


def compare(job: Job, endings: Sequence[Ending], expected: Mapping[Node, Records] | Exception) -> Verdict:
    """Compare ``endings``, by rank. ``expected`` is the reference's result, or what it raised."""
    raised = [ending.raised for ending in endings]
    if any(raised):
        return _compare_errors(job, raised, expected)
    must = [refusal.name for refusal in MUST_REFUSE if refusal.holds(job)]
    if must:
        return Verdict("finding", f"not refused: {must[0]}")
    if isinstance(expected, Exception):
        return _invalid(expected)
    exact = is_exact(job)
    lines = [
        f"rank {rank}, call {call}: {line}"
        for rank, ending in enumerate(endings)
        for call, (actual, reference) in enumerate(zip(ending.records, expected[ending.node], strict=True))
        for line in differences(job, actual, reference)
    ]
    if not lines:
        return Verdict("equal", "bit for bit" if exact else "to rounding")
    return Verdict("finding", f"differs: {_kind_of(lines[0])}", "\n".join(lines[:12]))


def _compare_errors(
    job: Job, raised: Sequence[Raised | None], expected: Mapping[Node, Records] | Exception
) -> Verdict:
    text = "\n".join(
        f"rank {rank}: {'nothing' if error is None else f'call {error.call}, {error.kind}: {error.text}'}"
        for rank, error in enumerate(raised)
    )
    errors = [error for error in raised if error is not None]
    firsts = [error for error in errors if not error.remote]
    traces = "\n".join(error.trace for error in firsts)
    if len(errors) < len(raised):
        return Verdict("finding", "an error on some ranks only", f"{text}\n{traces}")
    if not _together(errors):
        return Verdict("finding", "errors in different calls", f"{text}\n{traces}")
    if isinstance(expected, Exception):
        return _invalid(expected)
    if not firsts:
        return Verdict("finding", "every rank blames another one", text)
    bare = [error for error in errors if not error.ours]
    if bare:
        return Verdict("finding", f"unnamed error: {bare[0].kind}", f"{text}\n{traces}")
    for refusal in (*MUST_REFUSE, *REFUSALS):
        if any(refusal.fits(job, error.text) for error in firsts):
            return Verdict("refused", refusal.name, text)
    return Verdict(
        "finding", f"refused for no known reason: {_without_numbers(firsts[0].text)}", f"{text}\n{traces}"
    )


def _together(errors: Sequence[Raised]) -> bool:
    """Whether all ranks raise in the same call, or in the next if they had finished it."""
    first = min(error.call for error in errors)
    return all(error.call == first or (error.remote and error.call == first + 1) for error in errors)


def _invalid(error: Exception) -> Verdict:
    return Verdict("invalid", "the unsplit model raises", repr(error))


def _kind_of(line: str) -> str:
    """Return the name of what differs, without ranks and positions."""
    name = line.split(": ", 1)[1].split(":")[0]
    return _without_numbers(name)


def _without_numbers(text: str) -> str:
    return "".join("#" if character.isdigit() else character for character in text.splitlines()[0])[:110]
