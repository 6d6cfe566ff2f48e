"""Removes checks of ldt one at a time, and tests that the machine reveals each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import count, islice
from typing import Any
from unittest.mock import patch

from differential.compare import Verdict
from differential.grammar import draw
from differential.machine import Machine
from differential.spec import Job

__all__ = ["Mutant", "resolve", "table_of"]

_TRIED = 60  # jobs for each mutant
_AT_ONCE = 6


@dataclass(frozen=True)
class Mutant:
    """Replaces its ``targets``, each a "module:name.name", by ``replacement``; tried on jobs for which it ``holds``."""

    name: str
    targets: tuple[str, ...]
    replacement: Any
    holds: Callable[[Job], bool] = lambda job: True

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the mutant in this process."""
        with ExitStack() as patches:
            for target in self.targets:
                owner, name = resolve(target)
                patches.enter_context(patch.object(owner, name, self.replacement))
            yield


def resolve(target: str) -> tuple[Any, str]:
    """Return the owner of the target, and its name there."""
    module, names = target.split(":")
    *path, last = names.split(".")
    return reduce(getattr, path, importlib.import_module(module)), last


def first_found(mutant: Mutant, machine: Machine, seeds: Iterable[int]) -> tuple[Job, Verdict] | None:
    """Return the first job that reveals the mutant, of those that are tried."""
    drawn = (job for job in map(draw, seeds) if mutant.holds(job))
    jobs = list(islice(drawn, _TRIED))
    while jobs:
        batch, jobs = jobs[:_AT_ONCE], jobs[_AT_ONCE:]
        for job, verdict in machine.run(batch, mutant.name):
            if verdict.is_finding:
                return job, verdict
    return None


def table_of(
    mutants: Sequence[Mutant], machine: Machine, first: int = 0, names: str = ""
) -> tuple[str, list[str]]:
    """Return a Markdown row for each mutant whose name contains ``names``, and the names of those not revealed."""
    rows = ["| removed | revealed by seed | as |", "| --- | ---: | --- |"]
    missed = []
    for mutant in mutants:
        if names not in mutant.name:
            continue
        seen = first_found(mutant, machine, count(first))
        if seen is None:
            missed.append(mutant.name)
        seed, what = ("none", "") if seen is None else (str(seen[0].seed), seen[1].name)
        rows.append(f"| {mutant.name} | {seed} | {what} |")
        print(rows[-1], flush=True)
    return "\n".join(rows) + "\n", missed
