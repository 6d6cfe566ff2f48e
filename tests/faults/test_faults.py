"""Injects the faults of 25 seeds, each followed by a resumed run. `make faults` runs 200."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from faults.fault import KINDS, draw

if TYPE_CHECKING:
    from faults.harness import Harness

SEEDS = range(25)


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    from faults.harness import Harness

    with Harness() as made:
        yield made


@pytest.mark.parametrize("seed", SEEDS, ids="seed-{}".format)
def test_a_fault(harness: Harness, seed: int) -> None:
    """Rerun one: `python -m pytest tests/faults -k seed-17`, or `make faults ARGS="--seeds 17"`."""
    harness.run(seed).check()


def test_the_seeds_cover_all_kinds_twice() -> None:
    kinds = [draw(seed).kind for seed in SEEDS]
    assert all(kinds.count(kind) >= 2 for kind in KINDS)
    assert [draw(seed) for seed in SEEDS] == [draw(seed) for seed in SEEDS]
