"""Which saves there are, and which of them are complete: found by ranks that may see different disks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ldt.errors import LdtError
from ldt.runtime.disclosure import InputTypeError, InputValueError
from ldt.train.checkpoint.layout import Save, saves_in, stages_in
from ldt.train.checkpoint.record import StageRecord

__all__ = ["Paths", "catalog", "complete_saves", "describe_incomplete", "folders_of", "next_save", "paths_of"]

logger = logging.getLogger(__name__)

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Catalog = list[
    Any
]  # [step, again, [[stage, number of stages, save_id], ...]] for each save: it travels as JSON
_MOST_STAGES = 1_000_000  # as in the text of a topology
Stages = dict[int, tuple[int, str]]  # by number: how many its topology has, save_id


def paths_of(given: Paths) -> list[Path]:
    """One path or several. Raises ldt's TypeError for anything else."""
    several = [given] if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(several, Sequence) or not several:
        raise InputTypeError(f"expected the path of a checkpoint, or a list of such, got {given!r}")
    return list(map(folder_of, several))


def folder_of(given: str | os.PathLike[str]) -> Path:
    """Raises ldt's ValueError for what can be no folder."""
    path = Path(given)
    if not os.fspath(given) or path.is_file():
        what = "a file" if os.fspath(given) else "nothing"
        raise InputValueError(f"expected the folder of a checkpoint, got {what}")
    return path


def catalog(paths: Iterable[Path]) -> Catalog:
    """The saves that are seen under ``paths``. A stage whose record is damaged is logged and left out."""
    found: dict[Save, Stages] = {}
    for path in paths:
        for save in saves_in(path):
            stages = found.setdefault(save, {})
            for stage, folder in stages_in(path, save).items():
                try:
                    record = StageRecord.read(folder)
                except (LdtError, OSError) as error:  # it may be being removed
                    logger.warning("left out a stage of a checkpoint: %s", error)
                else:
                    stages.setdefault(stage, (record.topology.num_stages, record.save_id))
    return [
        [*save, [[stage, *rest] for stage, rest in sorted(stages.items())]]
        for save, stages in sorted(found.items())
    ]


def complete_saves(catalogs: Iterable[Catalog]) -> list[Save]:
    """Those of which all stages are seen, be it by different ranks; oldest first."""
    return sorted(save for save, stages in _united(catalogs).items() if _is_complete(stages))


def next_save(catalogs: Iterable[Catalog], step: int) -> Save:
    """One of ``step`` that nobody has begun."""
    again = [save.again for save in _united(catalogs) if save.step == step]
    return Save(step, max(again, default=-1) + 1)


def describe_incomplete(catalogs: Iterable[Catalog]) -> str:
    """The newest save that has stages but not all; empty if there is none."""
    parts = [(save, found) for save, found in _united(catalogs).items() if found and not _is_complete(found)]
    if not parts:
        return ""
    save, stages = max(parts)
    wanted = range(max(count for count, _ in stages.values()))
    return f"{save.folder} lacks stages {sorted(set(wanted) - stages.keys())}"


def folders_of(paths: Iterable[Path], save: Save) -> dict[int, Path]:
    """The folders of its stages that are seen under ``paths``; of two, the first."""
    found: dict[int, Path] = {}
    for path in paths:
        found = stages_in(path, save) | found
    return found


def _united(catalogs: Iterable[Catalog]) -> dict[Save, Stages]:
    """Raises LdtError for what ``catalog`` does not give: others' come from other ranks, and steps become paths."""
    found: dict[Save, Stages] = {}
    for step, again, stages in (entry for seen in catalogs for entry in seen):
        if not all(type(number) is int for number in (step, again)):
            raise LdtError(f"a rank tells of a step {str(step)[:40]!r}.{str(again)[:40]!r}, expected numbers")
        of_save = found.setdefault(Save(step, again), {})
        for stage, count, save_id in stages:
            if not (type(stage) is type(count) is int and 0 <= stage < count <= _MOST_STAGES):
                raise LdtError(
                    f"a rank tells of stage {str(stage)[:40]} of {str(count)[:40]}, expected numbers"
                )
            of_save[stage] = count, str(save_id)
    return found


def _is_complete(stages: Stages) -> bool:
    """All that its topology has, of one save."""
    return len(set(stages.values())) == 1 and all(
        stages.keys() == set(range(count)) for count, _ in stages.values()
    )
