"""How a rank of the text example exits after another one has failed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import ldt

EXAMPLES = str(Path(__file__).parents[2] / "examples")


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Make the examples importable, and collect exit codes instead of exiting."""
    codes: list[int] = []
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(os, "_exit", codes.append)
    handler = signal.getsignal(signal.SIGINT)
    yield codes
    signal.signal(signal.SIGINT, handler)


def test_interrupt_of_another_rank_is_quiet(exits: list[int]) -> None:
    from text.launch import quiet_interrupt

    with quiet_interrupt():
        raise ldt.RemoteStageError("rank 1 failed first", rank=1, error_type="KeyboardInterrupt")
    assert exits == [128 + signal.SIGINT]


def test_another_failure_that_speaks_of_an_interrupt_is_not(exits: list[int]) -> None:
    from text.launch import quiet_interrupt

    error = ldt.RemoteStageError(
        "rank 1 failed first: KeyError: 'KeyboardInterrupt'", rank=1, error_type="KeyError"
    )
    with pytest.raises(ldt.RemoteStageError, match="rank 1 failed first"), quiet_interrupt():
        raise error
    assert exits == []
