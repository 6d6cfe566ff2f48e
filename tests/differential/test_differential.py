"""Runs two hundred jobs of `make differential`, and tests that the machine itself detects errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

import torch

import ldt
from differential.compare import compare
from differential.grammar import draw
from differential.job import Ending, Raised
from differential.machine import Outcome
from differential.mutants import MUTANTS
from differential.mutation import Mutant, resolve
from differential.reference import reference
from differential.report import complaint, table
from differential.script import script_of
from differential.shrink import shrink
from differential.spec import Call, Item, Job
from ldt.topology import Node

if TYPE_CHECKING:
    from differential.compare import Verdict
    from differential.machine import Machine

SEEDS = range(200)
JOB = Job(
    chunks=((Item("Affine"), Item("Mlp", 1)), (Item("Scale", 1),), (Item("Affine", 2),)),
    calls=(Call("step", (1, 2)), Call("eval", (3,))),
)
NODES = (Node(0, 0), Node(1, 0))


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    from differential.machine import Machine

    with Machine() as made:
        yield made


@pytest.mark.timeout(1200)
def test_jobs_are_equal_or_refused(machine: Machine) -> None:
    """Rerun one: `make differential ARGS="--seeds 17"`."""
    outcomes = list(machine.run(map(draw, SEEDS)))
    findings = [outcome for outcome in outcomes if outcome.verdict.is_finding]
    details = "\n\n".join(f"seed {job.seed}: {verdict.name}\n{verdict.text}" for job, verdict in findings)
    assert not complaint(outcomes), f"{table(outcomes)}\n{details}"


def test_a_seed_is_a_job() -> None:
    assert [draw(seed) for seed in SEEDS] == [draw(seed) for seed in SEEDS]
    assert eval(repr(draw(7))) == draw(7)


def endings() -> list[Ending]:
    """Return the endings of a correct run."""
    right = reference(JOB)
    return [Ending(node, right[node]) for node in NODES]


def error(**details: object) -> Raised:
    values = {"call": 0, "kind": "LdtError", "text": "no", "ours": True, "remote": False, "trace": ""}
    return Raised(**(values | details))  # type: ignore[arg-type]


REMOTE = error(remote=True)


@pytest.mark.parametrize(
    ("raised", "name"),
    [
        ([None, None], "bit for bit"),
        ([REMOTE, error()], "refused for no known reason: no"),
        ([REMOTE, None], "an error on some ranks only"),
        ([error(), error(call=1)], "errors in different calls"),
        ([error(remote=True, call=2), error()], "errors in different calls"),
        ([error(remote=True, call=1), error()], "refused for no known reason: no"),
        ([REMOTE, REMOTE], "every rank blames another one"),
        ([REMOTE, error(kind="KeyError", ours=False)], "unnamed error: KeyError"),
    ],
)
def test_errors_of_ranks_are_compared(raised: list[Raised | None], name: str) -> None:
    ends = [replace(ending, raised=one) for ending, one in zip(endings(), raised, strict=True)]
    verdict = compare(JOB, ends, reference(JOB))
    assert verdict.name == name
    assert verdict.is_finding == any(raised)


@pytest.mark.parametrize(
    "name", ["losses", "gradient of chunk 0.parts.0.layer.weight", "the next random numbers"]
)
def test_different_values_are_a_finding(name: str) -> None:
    ends = endings()
    record = next(record for record in ends[0].records if name in record)
    record[name] = torch.nextafter(record[name], torch.ones(()).to(record[name]))
    verdict = compare(JOB, ends, reference(JOB))
    assert verdict.is_finding
    assert f"{name}:" in verdict.text


def test_none_is_not_zero() -> None:
    ends = endings()
    name = "gradient of chunk 1.parts.0.factor"
    ends[1].records[0][name] = None
    assert compare(JOB, ends, reference(JOB)).name == "differs: gradient of chunk #.parts.#.factor"


def test_a_job_shrinks_to_what_fails() -> None:
    from differential.compare import Verdict

    def run(job: Job) -> Verdict:
        return Verdict("finding" if job.has("Mlp") and job.plan == "split" else "equal", "differs: loss")

    job = replace(JOB, plan="split", tp=(1, 2), transfer="scatter", clips=True, optimizer="adamw")
    small, _ = shrink(job, run(job), run)
    assert small.plan == "split"
    assert sum(small.chunks, ()) == (Item("Mlp", 1),)
    assert (small.tp, small.clips, small.optimizer, small.transfer) == ((1,), False, "sgd", "leader")
    assert small.calls in ((Call("step", (1,)),), (Call("eval", (1,)),))


def test_a_script_is_standalone(tmp_path: Path) -> None:
    from differential.compare import Verdict

    job = replace(JOB, tp=(1,), chunks=(JOB.chunks[0], (Item("Accumulates"),)))
    script = tmp_path / "job.py"
    script.write_text(script_of(job, Verdict("finding", "differs", 'a "text"')))
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **one_rank, "PYTHONPATH": str(Path(ldt.__file__).parent.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nothing that was computed differs" in done.stdout


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_undone(mutant: Mutant) -> None:
    """`make differential ARGS=--mutants` shows that each is revealed."""
    before = [getattr(*resolve(target)) for target in mutant.targets]
    assert mutant.holds(JOB) in (True, False)
    with mutant.applied():
        assert all(getattr(*resolve(target)) is mutant.replacement for target in mutant.targets)
    assert [getattr(*resolve(target)) for target in mutant.targets] == before


def test_too_many_refusals_are_a_complaint() -> None:
    from differential.compare import Verdict

    good, refused = (Outcome(JOB, Verdict(kind, "why")) for kind in ("equal", "refused"))
    assert complaint([good] * 9 + [refused]) == ""
    assert "5 of 10 jobs were refused" in complaint([good, refused] * 5)
    assert "| refused | why | 5 | 0, 0, 0, 0, 0 |" in table([good, refused] * 5)
