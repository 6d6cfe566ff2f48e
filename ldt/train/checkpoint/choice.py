"""Chooses the save to load and words the error if it turns out to be damaged."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ldt.errors import CheckpointError
from ldt.train.checkpoint.catalog import Catalog, complete_saves, damaged_saves, describe_incomplete
from ldt.train.checkpoint.layout import Save, StorageError

__all__ = ["Choice", "choose"]

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """The chosen save and all complete ones. The same on all ranks."""

    save: Save
    complete: list[Save]

    @contextmanager
    def naming_alternatives(self) -> Iterator[None]:
        """Add to a StorageError raised in the context which other saves could be loaded."""
        try:
            yield
        except StorageError as error:
            raise error.reworded(self.unusable) from error

    def unusable(self, problem: str) -> str:
        """The error text for a save with a ``problem``."""
        steps = sorted({save.step for save in self.complete if save != self.save})
        others = f"the complete steps are {steps}" if steps else "no other step is complete"
        advice = "or move it away to continue without it"
        for step in steps:
            if step != self.save.step:
                advice = f"move it away, or load another step, such as step={step}"
        return f"{self.save.folder} exists but cannot be used, and {others}: {problem}. Repair it, {advice}"


def choose(catalogs: Sequence[Catalog], step: int | None) -> Choice | None:
    """Return the newest complete save, of ``step`` if given; None if there is none.

    Raises CheckpointError if ``step`` is given and has none, or if the newest candidate cannot be read.
    """
    complete, damaged = complete_saves(catalogs), damaged_saves(catalogs)
    wanted = [save for save in (*complete, *damaged) if step is None or save.step == step]
    if wanted:
        choice = Choice(max(wanted), complete)
        if choice.save in damaged:
            raise CheckpointError(choice.unusable(damaged[choice.save]))
        return choice
    if step is not None:
        steps = sorted({save.step for save in complete})
        raise CheckpointError(
            f"step {step} is missing or incomplete: the complete steps are {steps or 'none'}"
        )
    partly = describe_incomplete(catalogs)
    if partly:
        logger.warning("no checkpoint is complete: of the newest, %s", partly)
    return None
