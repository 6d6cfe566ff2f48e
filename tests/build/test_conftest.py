"""A test run begins with the longest files and ends with at most ten lines about what it skipped."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

spec = importlib.util.spec_from_file_location("root_conftest", Path(__file__).parents[1] / "conftest.py")
assert spec is not None
assert spec.loader is not None
conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conftest)


def test_a_line_for_each_reason_the_most_frequent_first() -> None:
    skips = [("a.py", 1, "Skipped: needs a GPU")] + [
        ("b.py", n, "Skipped: needs two GPUs") for n in range(12)
    ]
    assert conftest.skip_lines(skips) == ["  12 tests: needs two GPUs", "   1 tests: needs a GPU"]


def test_never_more_than_ten_lines() -> None:
    skips = [("a.py", n, f"Skipped: reason {n % 14}") for n in range(28)]
    lines = conftest.skip_lines(skips)
    assert len(lines) == 10
    assert lines[-1] == "  10 tests for 5 other reasons (pytest -rs)"


def test_no_skips_no_lines() -> None:
    assert conftest.skip_lines([]) == []


def test_the_longest_files_come_first_and_exist() -> None:
    longest = [conftest.TESTS / name for name in conftest.LONGEST]
    assert all(path.exists() for path in longest)
    items = [SimpleNamespace(path=path) for path in [Path("a.py"), *reversed(longest), Path("b.py")]]
    conftest.pytest_collection_modifyitems(items)
    assert [item.path for item in items] == [*longest, Path("a.py"), Path("b.py")]
