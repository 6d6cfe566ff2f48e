"""Summarizes the outcomes of many jobs in a table, and checks them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from differential.machine import Outcome

__all__ = ["MOST_REFUSED", "complaint", "table"]

MOST_REFUSED = 0.3  # of all jobs; with more refusals the machine tests too little
_KINDS = ("equal", "refused", "invalid", "finding")
_SHOWN = 5


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with a row for each outcome and some of its seeds."""
    counts = Counter((outcome.verdict.kind, outcome.verdict.name) for outcome in outcomes)
    rows = [("outcome", "", "jobs", "such as"), ("---", "---", "---:", "---")]
    for (kind, name), count in sorted(counts.items(), key=lambda row: (_KINDS.index(row[0][0]), -row[1])):
        seeds = sorted(o.job.seed for o in outcomes if (o.verdict.kind, o.verdict.name) == (kind, name))
        rows.append((kind, name, str(count), ", ".join(map(str, seeds[:_SHOWN]))))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def complaint(outcomes: Sequence[Outcome], most_refused: float = MOST_REFUSED) -> str:
    """Return what is wrong with the outcomes; empty if nothing is."""
    findings = [outcome.job.seed for outcome in outcomes if outcome.verdict.is_finding]
    if findings:
        return f"{len(findings)} findings: seeds {', '.join(map(str, findings))}"
    unseen = sum(outcome.verdict.kind in ("refused", "invalid") for outcome in outcomes)
    if unseen > most_refused * len(outcomes):
        return (
            f"{unseen} of {len(outcomes)} jobs were refused or invalid: more than a share of {most_refused:g}"
        )
    return ""
