"""Fixtures for tests on several ranks. torch is imported only where one is used: the pure tier runs without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ldt.testing import RankPool


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """The module's processes: as many as its WORLD_SIZE says (default 4), started at the first use."""
    from ldt.testing import RankPool

    with RankPool(getattr(request.module, "WORLD_SIZE", 4)) as made:
        yield made
