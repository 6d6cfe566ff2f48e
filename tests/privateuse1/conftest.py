"""Skips the tests of this folder if their device was not built; `make test` builds it."""

from __future__ import annotations

import pytest
from npu import MODULE


@pytest.fixture(autouse=True)
def _device_is_built() -> None:
    if not MODULE.exists():
        pytest.skip(f"{MODULE} was not built: install with LDT_BUILD_TESTS=ON, as `make test` does")
