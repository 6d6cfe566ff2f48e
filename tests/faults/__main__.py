"""`python -m faults` injects the faults of many seeds and prints a table of results. `make faults` runs it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from faults.fault import KINDS
from faults.harness import Harness, Outcome
from faults.link_fault import LINK_KINDS
from faults.link_harness import LinkHarness

_HEAD = ("fault", "runs", "time until all ranks raised (max)", "lost (max)", "not as expected")
_LOST = {"disk_full": "that save", "pause": "nothing", "slow": "nothing", "outage": "nothing"}
_KINDS = (*KINDS, *dict.fromkeys(kind for kind, *_ in LINK_KINDS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a seed did not end as expected, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument(
        "--seeds", default="0-199", help='such as "17", "0-24" or "3,5,8-9" (default: %(default)s)'
    )
    parser.add_argument(
        "--link",
        action="store_true",
        help="faults of the link between two sites, in network namespaces (root)",
    )
    parser.add_argument("--table", type=Path, help="write a table in Markdown to this file")
    options = parser.parse_args(arguments)
    outcomes = []
    with LinkHarness() if options.link else Harness() as harness:
        for seed in _numbers(options.seeds):
            start = time.monotonic()
            outcomes.append(harness.run(seed))
            _print_outcome(outcomes[-1], time.monotonic() - start)
    text = table(outcomes)
    print(text)
    if options.table is not None:
        options.table.parent.mkdir(parents=True, exist_ok=True)
        options.table.write_text(text)
    return int(any(outcome.complaints for outcome in outcomes))


def _print_outcome(outcome: Outcome, seconds: float) -> None:
    raised = "nothing raised" if outcome.seconds is None else f"all raised after {outcome.seconds:.2f} s"
    print(f"{outcome.fault}: {raised}, {seconds:.1f} s in all", flush=True)
    for complaint in outcome.complaints:
        print("  " + complaint.replace("\n", "\n    "), flush=True)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with a row for each kind of fault."""
    rows = [_HEAD, ("---", *["---:"] * (len(_HEAD) - 1))]
    rows += [
        _row(kind, of_kind) for kind in _KINDS if (of_kind := [o for o in outcomes if o.fault.kind == kind])
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(kind: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    return (
        kind,
        str(len(outcomes)),
        f"{max(seconds):.2f} s" if seconds else "nothing raised",
        _LOST.get(kind, f"its step and {max(outcome.repeated for outcome in outcomes)} before"),
        str(sum(bool(outcome.complaints) for outcome in outcomes)),
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
