"""Injects one fault of each kind, followed by a resumed run. `make slow` goes on to 25 seeds, `make faults` to 200."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from faults.fault import KINDS, draw

if TYPE_CHECKING:
    from faults.harness import Harness

SEEDS = range(25)
QUICK = SEEDS[: len(KINDS)]


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    from faults.harness import Harness

    with Harness() as made:
        yield made


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed in QUICK else pytest.mark.slow) for seed in SEEDS],
    ids="seed-{}".format,
)
def test_a_fault(harness: Harness, seed: int) -> None:
    """Rerun one: `python -m pytest tests/faults -k seed-7`, or `make faults ARGS="--seeds 17"`."""
    harness.run(seed).check()


def test_the_seeds_cover_all_kinds() -> None:
    kinds = [draw(seed).kind for seed in SEEDS]
    assert {draw(seed).kind for seed in QUICK} == set(KINDS)
    assert all(kinds.count(kind) >= 2 for kind in KINDS)
    assert [draw(seed) for seed in SEEDS] == [draw(seed) for seed in SEEDS]
