"""Runs all teardown steps, even if some raise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

__all__ = ["run_teardown"]

logger = logging.getLogger(__name__)


def run_teardown(steps: Iterable[tuple[str, Callable[[], object]]]) -> BaseException | None:
    """Run every named step, and log each one that raises. Returns the first error."""
    first: BaseException | None = None
    for what, step in steps:
        try:
            step()
        except BaseException as error:  # Ctrl-C, too: a step that is skipped now never runs
            logger.exception("could not %s", what)
            first = first or error
    return first
