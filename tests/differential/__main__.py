"""`python -m differential` compares random jobs with the unsplit model. `make differential` runs it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from differential.grammar import draw
from differential.machine import Machine, Outcome
from differential.mutants import MUTANTS
from differential.mutation import table_of
from differential.report import MOST_REFUSED, complaint, table
from differential.script import script_of
from differential.shrink import shrink


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if there is a finding, or too many jobs were refused, otherwise 0."""
    options = _parser().parse_args(arguments)
    seeds = _numbers(options.seeds) if options.seeds else range(options.first, options.first + options.jobs)
    start = time.monotonic()
    if options.mutants is not None:
        return _try_mutants(options)
    outcomes = []
    with Machine() as machine:
        for outcome in machine.run(draw(seed, everything=options.everything) for seed in seeds):
            _print_finding(outcome, outcomes, machine, options.scripts)
            outcomes.append(outcome)
    text = table(outcomes)
    print(text + f"\n{len(outcomes)} jobs in {time.monotonic() - start:.0f} s")
    if options.table is not None:
        options.table.parent.mkdir(parents=True, exist_ok=True)
        options.table.write_text(text)
    wrong = complaint(outcomes, options.most_refused)
    print(wrong or "all jobs are equal or refused with a known error")
    return int(bool(wrong))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m differential", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--seeds", help='run these seeds instead, such as "17" or "3,5,8-9"')
    parser.add_argument(
        "--everything", action="store_true", help="include jobs that are switched off as known"
    )
    parser.add_argument(
        "--most-refused", type=float, default=MOST_REFUSED, help="a share (default: %(default)s)"
    )
    parser.add_argument("--table", type=Path, help="write the table in Markdown to this file")
    parser.add_argument(
        "--scripts", type=Path, help="cut each new kind of finding down to a script in this folder"
    )
    parser.add_argument(
        "--mutants",
        nargs="?",
        const="",
        help="remove checks of ldt one at a time, those with this text in their name",
    )
    return parser


def _try_mutants(options: argparse.Namespace) -> int:
    with Machine() as machine:
        text, missed = table_of(MUTANTS, machine, options.first, options.mutants)
    if options.table is not None:
        options.table.write_text(text)
    print(f"not found: {', '.join(missed)}" if missed else "all were found")
    return int(bool(missed))


def _print_finding(
    outcome: Outcome, earlier: Sequence[Outcome], machine: Machine, scripts: Path | None
) -> None:
    """Print a finding, and write a script for the first of its family."""
    job, verdict = outcome
    if not verdict.is_finding:
        return
    print(f"seed {job.seed}: {verdict.name}\n  " + verdict.text.replace("\n", "\n  "), flush=True)
    if scripts is None or any(verdict.family == other.verdict.family for other in earlier):
        return
    job, verdict = shrink(job, verdict, machine.run_one)
    scripts.mkdir(parents=True, exist_ok=True)
    path = scripts / f"seed_{job.seed}.py"
    path.write_text(script_of(job, verdict))
    print(
        f"cut down: {job}\ntorchrun --standalone --nproc-per-node {job.topology.world_size} {path}",
        flush=True,
    )


def _numbers(text: str) -> list[int]:
    """Return the numbers in ranges such as "3,5,8-9"."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


if __name__ == "__main__":
    sys.exit(main())
