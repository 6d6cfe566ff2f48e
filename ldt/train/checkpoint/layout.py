"""The folders of a checkpoint and their names, which change in one step of the file system."""

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
    """One save: the step after which it was made, and how many of the same step there were before."""

    step: int
    again: int = 0

    @property
    def folder(self) -> str:
        """Its name. A save never goes into a folder that was there: what is complete stays so."""
        return f"step-{self.step}.{self.again}" if self.again else f"step-{self.step}"


def saves_in(path: Path) -> list[Save]:
    """All that were begun in ``path``, oldest first; none where there is no such folder.

    Raises OSError for one that is there and cannot be read.
    """
    found = filter(None, map(_SAVE.fullmatch, _names_in(path)))
    return sorted(Save(int(match[1]), int(match[2] or 0)) for match in found)


def stages_in(path: Path, save: Save) -> dict[int, Path]:
    """The complete folders of stages of a save. Raises OSError as ``saves_in`` does."""
    folder = path / save.folder
    found = filter(None, map(_STAGE.fullmatch, _names_in(folder)))
    return {int(match[1]): folder / match[0] for match in found}


def is_gone(path: Path) -> bool:
    """Whether nothing has this name, not even a link to nowhere. Raises OSError where that cannot be known."""
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
    """Where a stage is, once it is complete."""
    return path / save.folder / f"stage-{stage}"


def unfinished_folder(path: Path, save: Save, stage: int) -> Path:
    """Where a stage writes, until it is complete."""
    return path / save.folder / f".stage-{stage}"


def rank_folder(replica: int, tp_rank: int) -> str:
    """Where one rank of a stage writes, in the folder of the stage."""
    return f"rank-{replica}.{tp_rank}"


def publish(path: Path, save: Save, stage: int) -> None:
    """Give what a stage wrote its final name, when all of it is on the disk."""
    unfinished = unfinished_folder(path, save, stage)
    sync(unfinished)
    unfinished.rename(stage_folder(path, save, stage))
    for folder in (path / save.folder, path):
        sync(folder)
    with suppress(PermissionError):  # it may have been there, and be another's
        sync(path.parent)


def discard(path: Path, save: Save, stage: int, *, published: bool) -> None:
    """Remove what a stage wrote for a save that failed; with ``published`` also if it has its final name."""
    if published:
        with suppress(OSError):
            stage_folder(path, save, stage).rename(unfinished_folder(path, save, stage))
    shutil.rmtree(unfinished_folder(path, save, stage), ignore_errors=True)
    with suppress(OSError):  # other stages' may be there
        (path / save.folder).rmdir()


def clear(path: Path, current: Save, kept: Collection[Save]) -> None:
    """Remove saves older than ``current`` but for those ``kept``. Several ranks may do so at once.

    Each is renamed first, so that no part of one that is half removed is taken for complete.
    """
    _remove_renamed(path)  # those of a call that was killed
    for save in saves_in(path):
        if save < current and save not in kept:
            with suppress(FileNotFoundError):  # another rank was first
                (path / save.folder).rename(path / f"{_REMOVED}{save.folder}")
    _remove_renamed(path)


def _remove_renamed(path: Path) -> None:
    for folder in path.glob(f"{_REMOVED}step-*"):
        shutil.rmtree(folder, ignore_errors=True)


def write_synced(file: Path, data: bytes) -> None:
    """Write ``file`` and wait until it is on the disk."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync(folder: Path) -> None:
    """Names, too, must be on the disk. Some file systems look after that themselves and refuse to be asked."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


class StorageError(CheckpointError, QuotingError):
    """What the file system refused, or what a file has that should not be there.

    Of the edge's, other ranks do not learn the path.
    """

    @classmethod
    def of(cls, path: Path, problem: str) -> StorageError:
        """Of the file or folder at ``path``, which for other ranks begins with that of the save."""
        return cls(f"{path} {problem}", f"{_in_save(path) or path.name} {problem}")

    def reworded(self, change: Callable[[str], str]) -> StorageError:
        """The same with ``change`` made to both of its texts."""
        return type(self)(change(str(self)), change(self.plain))

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointError, self.args


def _in_save(path: Path) -> str:
    """The end of ``path``, from the folder of a save on; empty if it is in none."""
    starts = [index for index, part in enumerate(path.parts) if _SAVE.fullmatch(part)]
    return "/".join(path.parts[starts[-1] :]) if starts else ""


@contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Turns an OSError into an LdtError that says what could not be done."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        file = "" if error.filename is None else os.fsdecode(error.filename)
        text, plain = (
            f"{what}: {reason}" + f" ({name})" * bool(name) for name in (file, _in_save(Path(file)))
        )
        raise StorageError(text, plain) from error
