"""The folders of a checkpoint, which are published and removed by an atomic rename."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ldt.errors import CheckpointError
from ldt.runtime.common.redact import QuotingError

__all__ = [
    "RANDOM_STATES",
    "Save",
    "StorageError",
    "clear",
    "discard",
    "file_errors",
    "is_gone",
    "publish",
    "rank_folder",
    "saves_in",
    "stage_folder",
    "stages_in",
    "sync",
    "unfinished_folder",
    "write_synced",
]

logger = logging.getLogger(__name__)

RANDOM_STATES = "random_states.json"  # in the folder of a rank

_SAVE = re.compile(r"step-([0-9]{1,18})(?:\.([0-9]{1,9}))?")
_STAGE = re.compile(r"stage-([0-9]{1,6})")
_REMOVED = ".removed-"


class Save(NamedTuple):
    """One save: the step after which it was made, and the number of earlier saves of that step."""

    step: int
    again: int = 0

    @property
    def folder(self) -> str:
        """Its name. A save never writes to an existing folder, so a complete save stays complete."""
        return f"step-{self.step}.{self.again}" if self.again else f"step-{self.step}"


def saves_in(path: Path) -> list[Save]:
    """All saves in ``path``, complete or not, oldest first. Empty if the folder does not exist.

    Raises OSError if it exists but cannot be read.
    """
    found = filter(None, map(_SAVE.fullmatch, _names_in(path)))
    return sorted(Save(int(match[1]), int(match[2] or 0)) for match in found)


def stages_in(path: Path, save: Save) -> dict[int, Path]:
    """The complete folders of stages of a save. Raises OSError as ``saves_in`` does."""
    folder = path / save.folder
    found = filter(None, map(_STAGE.fullmatch, _names_in(folder)))
    return {int(match[1]): folder / match[0] for match in found}


def is_gone(path: Path) -> bool:
    """Whether ``path`` does not exist, not even as a dangling link. Raises OSError if that cannot be determined."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    return False


def _names_in(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        if is_gone(folder):
            return []
        raise


def stage_folder(path: Path, save: Save, stage: int) -> Path:
    """The folder of a complete stage."""
    return path / save.folder / f"stage-{stage}"


def unfinished_folder(path: Path, save: Save, stage: int) -> Path:
    """The folder that a stage writes to until it is complete."""
    return path / save.folder / f".stage-{stage}"


def rank_folder(replica: int, tp_rank: int) -> str:
    """The name of a rank's folder in the folder of its stage."""
    return f"rank-{replica}.{tp_rank}"


def publish(path: Path, save: Save, stage: int) -> None:
    """Sync a stage's folder to disk and give it its final name."""
    unfinished = unfinished_folder(path, save, stage)
    sync(unfinished)
    unfinished.rename(stage_folder(path, save, stage))
    for folder in (path / save.folder, path):
        sync(folder)
    with suppress(PermissionError):  # the parent may belong to another user
        sync(path.parent)


def discard(path: Path, save: Save, stage: int, *, published: bool) -> None:
    """Remove the folder of a stage whose save failed; with ``published`` also one that has its final name."""
    if published:
        with suppress(OSError):
            stage_folder(path, save, stage).rename(unfinished_folder(path, save, stage))
    shutil.rmtree(unfinished_folder(path, save, stage), ignore_errors=True)
    with suppress(OSError):  # folders of other stages may remain
        (path / save.folder).rmdir()


def clear(path: Path, current: Save, kept: Collection[Save]) -> None:
    """Remove saves older than ``current`` that are not in ``kept``. Several ranks may do so at once.

    Renames each save first, so that a partly removed one never looks complete.
    """
    _remove_renamed(path)  # left over from a killed call
    for save in saves_in(path):
        if save < current and save not in kept:
            with suppress(FileNotFoundError):  # another rank was first
                (path / save.folder).rename(path / f"{_REMOVED}{save.folder}")
    _remove_renamed(path)


def _remove_renamed(path: Path) -> None:
    for folder in path.glob(f"{_REMOVED}step-*"):
        shutil.rmtree(folder, ignore_errors=True)


def write_synced(file: Path, data: bytes) -> None:
    """Write ``file`` and sync it to disk."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync(folder: Path) -> None:
    """Sync the names in ``folder`` to disk. Some file systems do that themselves and refuse the call."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


class StorageError(CheckpointError, QuotingError):
    """An error of the file system, or invalid contents of a file.

    Other ranks do not see the edge's paths.
    """

    @classmethod
    def of(cls, path: Path, problem: str) -> StorageError:
        """The error for a file or folder. Other ranks see its path only from the save's folder on."""
        return cls(f"{path} {problem}", f"{_in_save(path) or path.name} {problem}")

    def reworded(self, change: Callable[[str], str]) -> StorageError:
        """The same error with ``change`` applied to both of its texts."""
        return type(self)(change(str(self)), change(self.plain))

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointError, self.args


def _in_save(path: Path) -> str:
    """The end of ``path`` from the folder of a save on; empty if there is none."""
    starts = [index for index, part in enumerate(path.parts) if _SAVE.fullmatch(part)]
    return "/".join(path.parts[starts[-1] :]) if starts else ""


@contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Turn an OSError into an LdtError that says what failed."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        file = "" if error.filename is None else os.fsdecode(error.filename)
        text, plain = (
            f"{what}: {reason}" + f" ({name})" * bool(name) for name in (file, _in_save(Path(file)))
        )
        raise StorageError(text, plain) from error
