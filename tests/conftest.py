"""Fixtures for tests on several ranks, the order of files, and why tests were skipped.

torch is imported only where a fixture is used.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ldt.testing import RankPool

# As in the ranks: what is compared bit for bit is summed in the same order. Before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell starts what it runs with & without Ctrl-C, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("ldt", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("ldt"), max_examples=300)
settings.load_profile("ldt")

TESTS = Path(__file__).parent
BENCHMARKS = TESTS.parent / "benchmarks"
LONGEST = (  # files, by the time that each takes
    "differential/test_differential.py",
    "runtime/health/test_lost_ranks.py",
    "benchmarks/test_benchmarks.py",
    "integrations/test_hf_trainer.py",
    "plan/planner/test_optimize.py",
    "faults/test_faults.py",
    "runtime/health/test_exits.py",
    "integrations/test_hf_vision.py",
    "examples/test_train_text.py",
    "privateuse1/test_connect_npu.py",
    "runtime/execution/test_bit_equality.py",
    "train/test_checkpoint_resume.py",
    "runtime/health/test_broken_groups.py",
    "launch/test_launcher.py",
    "launch/test_tunnel.py",
    "runtime/comm/test_sharded_hops.py",
    "cli/test_plan_command.py",
    "examples/test_finetune_hf.py",
    "faults/test_first_failure.py",
    "plan/schedules/test_ushape.py",
    "runtime/comm/test_compression.py",
    "runtime/comm/test_socket_links.py",
    "docs/test_pages.py",
    "runtime/comm/test_transfer_modes.py",
    "runtime/health/test_failures.py",
    "runtime/model/test_ties.py",
)
MOST_REASONS = 9  # and one line for the others


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """The module's processes: as many as its WORLD_SIZE says (default 4), started at the first use."""
    from ldt.testing import RankPool

    with RankPool(getattr(request.module, "WORLD_SIZE", 4)) as made:
        yield made


@pytest.fixture
def wide_area(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the test import the benchmarks' ``wan_link``; skips it where no link can be emulated."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from wan_link import check_wan

    try:
        check_wan()
    except ValueError as error:
        pytest.skip(str(error))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with ``LONGEST``, so that no worker is still busy with one when the others have nothing left to do."""
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why tests were skipped, a line for each reason."""
    lines = skip_lines([report.longrepr for report in terminalreporter.stats.get("skipped", [])])
    if lines:
        terminalreporter.section("skipped")
        for line in lines:
            terminalreporter.write_line(line)


def skip_lines(skips: list[tuple[str, int, str]]) -> list[str]:
    """At most ten lines from (file, line, reason): how many tests, and why; the most frequent reasons first."""
    tests = Counter(text.removeprefix("Skipped: ") for _, _, text in skips).most_common()
    lines = [f"{count:4d} tests: {reason}" for reason, count in tests[:MOST_REASONS]]
    others = tests[MOST_REASONS:]
    if others:
        count = sum(count for _, count in others)
        lines.append(f"{count:4d} tests for {len(others)} other reasons (pytest -rs)")
    return lines
