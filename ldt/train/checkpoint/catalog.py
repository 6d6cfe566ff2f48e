"""Lists the saves and finds the complete ones. Ranks may see different disks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ldt.errors import CheckpointError, LdtError
from ldt.runtime.common.peer_messages import plain
from ldt.runtime.common.redact import InputTypeError, InputValueError
from ldt.train.checkpoint.layout import Save, StorageError, file_errors, is_gone, saves_in, stages_in
from ldt.train.checkpoint.stage_manifest import FILE, StageManifest

__all__ = [
    "Paths",
    "catalog",
    "complete_saves",
    "damaged_saves",
    "describe_incomplete",
    "folders_of",
    "kept_saves",
    "next_save",
    "paths_of",
]

logger = logging.getLogger(__name__)

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
# For each save [step, again, [[stage, number of stages, save_id], ...]], then its damage if any. Sent as JSON.
Catalog = list[Any]
_MAX_STAGES = 1_000_000  # as in the text of a topology
Stages = dict[int, tuple[int, str]]  # by stage: the number of stages in its topology, save_id


class _Seen(NamedTuple):
    """The stages of one save, and what of it cannot be read."""

    stages: Stages
    damage: list[str]


def paths_of(given: Paths) -> list[Path]:
    """Return one path or several as a list. Raises TypeError for anything else."""
    several = [given] if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(several, Sequence) or not several:
        raise InputTypeError(
            f"expected the path of a checkpoint or a list of paths, got {type(given).__name__}"
        )
    return list(map(folder_of, several))


def folder_of(given: str | os.PathLike[str]) -> Path:
    """Return ``given`` as a path. Raises ValueError if it cannot be a folder."""
    path = Path(given)
    if not os.fspath(given) or path.is_file():
        what = "a file" if os.fspath(given) else "nothing"
        raise InputValueError(f"expected the folder of a checkpoint, got {what}")
    return path


def catalog(paths: Iterable[Path], describe: Callable[[Exception], str] = str) -> Catalog:
    """List the saves under ``paths``. Damage is the text that ``describe`` returns for the error.

    Raises OSError if one of ``paths`` exists but cannot be read.
    """
    found: dict[Save, _Seen] = {}
    for path in paths:
        for save in saves_in(path):
            seen = found.setdefault(save, _Seen({}, []))
            try:
                _look(path, save, seen.stages)
            except CheckpointError as error:
                logger.warning("a checkpoint cannot be used: %s", error)
                seen.damage.append(describe(error))
    return [
        [*save, [[stage, *rest] for stage, rest in sorted(seen.stages.items())], *seen.damage[:1]]
        for save, seen in sorted(found.items())
    ]


def _look(path: Path, save: Save, stages: Stages) -> None:
    """Add the stages of ``save`` that are in ``path``. Raises CheckpointError for one that cannot be read."""
    with file_errors(f"{save.folder} cannot be read"):
        folders = stages_in(path, save)
    for stage, folder in folders.items():
        try:
            with file_errors(f"{save.folder}/{folder.name}/{FILE} cannot be read"):
                record = StageManifest.read(folder)
        except CheckpointError:
            with file_errors(f"{save.folder}/{folder.name} cannot be read"):
                if not is_gone(folder):  # another rank may just have removed it
                    raise
            continue
        if (record.stage, record.step) != (stage, save.step):
            raise StorageError.of(
                folder / FILE,
                f"is that of stage {record.stage} of step {record.step}: expected stage {stage} of step {save.step}",
            )
        stages.setdefault(stage, (record.topology.num_stages, record.save_id))


def complete_saves(catalogs: Iterable[Catalog]) -> list[Save]:
    """The undamaged saves of which the ranks together see all stages, oldest first."""
    return sorted(save for save, seen in _united(catalogs).items() if _is_complete(seen))


def damaged_saves(catalogs: Iterable[Catalog]) -> dict[Save, str]:
    """The saves of which something cannot be read, with one rank's error."""
    return {save: seen.damage[0] for save, seen in _united(catalogs).items() if seen.damage}


def next_save(catalogs: Iterable[Catalog], step: int) -> Save:
    """The next unused save of ``step``."""
    again = [save.again for save in _united(catalogs) if save.step == step]
    return Save(step, max(again, default=-1) + 1)


def kept_saves(catalogs: Iterable[Catalog], current: Save, keep: int) -> list[Save]:
    """The saves older than ``current``, which is complete, that are among the last ``keep``.

    They are complete or damaged. A damaged save is only removed once ``keep`` newer ones are complete. Saves that were
    never complete are not kept.
    """
    united = _united(catalogs)
    complete = [save for save, seen in united.items() if _is_complete(seen) and save < current]
    return [
        save
        for save, seen in united.items()
        if save < current
        and (seen.damage or save in complete)
        and 1 + sum(other > save for other in complete) < keep
    ]


def describe_incomplete(catalogs: Iterable[Catalog]) -> str:
    """Describe the newest incomplete save; empty if there is none."""
    united = _united(catalogs).items()
    parts = [(save, seen.stages) for save, seen in united if seen.stages and not _is_complete(seen)]
    if not parts:
        return ""
    save, stages = max(parts)
    wanted = range(max(count for count, _ in stages.values()))
    return f"{save.folder} lacks stages {sorted(set(wanted) - stages.keys())}"


def folders_of(paths: Iterable[Path], save: Save) -> dict[int, Path]:
    """The folders of its stages under ``paths``, by stage. The first path that has a stage counts."""
    found: dict[int, Path] = {}
    for path in paths:
        found = stages_in(path, save) | found
    return found


def _united(catalogs: Iterable[Catalog]) -> dict[Save, _Seen]:
    """Merge the catalogs of all ranks.

    Raises LdtError for an entry that ``catalog`` cannot return: other ranks are not trusted, and steps become paths.
    """
    found: dict[Save, _Seen] = {}
    for step, again, stages, *damage in (entry for seen in catalogs for entry in seen):
        if not all(type(number) is int for number in (step, again)):
            raise LdtError(f"a rank reports step {str(step)[:40]!r}.{str(again)[:40]!r}, expected numbers")
        of_save = found.setdefault(Save(step, again), _Seen({}, []))
        of_save.damage.extend(plain(str(text)) for text in damage)
        for stage, count, save_id in stages:
            if not (type(stage) is type(count) is int and 0 <= stage < count <= _MAX_STAGES):
                raise LdtError(
                    f"a rank reports stage {str(stage)[:40]} of {str(count)[:40]}, expected numbers"
                )
            reported = count, str(save_id)
            if any(other != reported for other in of_save.stages.values()):
                of_save.damage.append(_mixed(Save(step, again), stage))
            of_save.stages.setdefault(stage, reported)
    return found


def _mixed(save: Save, stage: int) -> str:
    return (
        f"{save.folder}/stage-{stage} is not of the same save as other stages of that step: one of the paths is a "
        "folder of another job, or of a run that did not see all paths"
    )


def _is_complete(seen: _Seen) -> bool:
    """Whether all stages of its topology are present and nothing is damaged."""
    stages = seen.stages
    wanted = {count for count, _ in stages.values()}
    return not seen.damage and any(stages.keys() == set(range(count)) for count in wanted)
