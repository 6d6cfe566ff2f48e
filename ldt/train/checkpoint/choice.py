"""Which save is loaded, and what to do where it turns out to be damaged."""

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
    """A save, and the complete ones that there are; all ranks make the same."""

    save: Save
    complete: list[Save]

    @contextmanager
    def naming_others(self) -> Iterator[None]:
        """A StorageError that is raised while the save is read says what else could be loaded."""
        try:
            yield
        except StorageError as error:
            raise error.reworded(self.unusable) from error

    def unusable(self, problem: str) -> str:
        """What to say if the save has a ``problem``."""
        steps = sorted({save.step for save in self.complete if save != self.save})
        others = f"complete are {steps}" if steps else "no other"
        advice = "or move it away to do without it"
        for step in steps:
            if step != self.save.step:
                advice = f"move it away, or load another one, as with step={step}"
        return f"{self.save.folder} is there but cannot be used, and {others}: {problem}. Repair it, {advice}"


def choose(catalogs: Sequence[Catalog], step: int | None) -> Choice | None:
    """The newest complete save, of ``step`` if one is asked for; None if there is none.

    Raises CheckpointError if there is none that is asked for, or the newest of these is one that cannot be read.
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
        raise CheckpointError(f"step {step} is not there, or is not complete: complete are {steps or 'none'}")
    partly = describe_incomplete(catalogs)
    if partly:
        logger.warning("no checkpoint is complete: of the newest that was begun, %s", partly)
    return None
