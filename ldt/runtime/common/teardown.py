"""Ends several things, each whatever becomes of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

__all__ = ["run_teardown"]

logger = logging.getLogger(__name__)


def run_teardown(ends: Iterable[tuple[str, Callable[[], object]]]) -> BaseException | None:
    """Do all of ``ends``, which are named in the log where one raises. Returns the first error."""
    first: BaseException | None = None
    for what, end in ends:
        try:
            end()
        except BaseException as error:  # also Ctrl-C: what is not ended now never is
            logger.exception("could not %s", what)
            first = first or error
    return first
