"""Reads the folder of one rank in a stage and verifies the checksums of its files."""

from __future__ import annotations

from pathlib import Path

from ldt.train.checkpoint.checksums import Checksums
from ldt.train.checkpoint.files import damaged, read_bytes
from ldt.train.checkpoint.layout import file_errors
from ldt.train.checkpoint.stage_manifest import StageManifest

__all__ = ["RankPart"]

_CANNOT = "a file of the checkpoint cannot be read"


class RankPart:
    """The folder of one rank. Raises CheckpointError naming a damaged file. Earlier versions wrote no checksums."""

    def __init__(self, folder: Path, record: StageManifest) -> None:
        self._folder = folder
        self._sums: Checksums | None = None
        self._known: dict[str, set[int]] = {}  # offsets of the pieces already checked
        if record.has_checksums:
            with file_errors(_CANNOT):
                self._sums = Checksums.read(folder, record.save_id)

    def content(self, name: str) -> bytes:
        """Read a small file as a whole."""
        file = self._folder / name
        with file_errors(_CANNOT):
            data = read_bytes(file)
            if self._sums is not None:
                self._sums.check_size(file)
                self._sums.check(file, 0, data)
        return data

    def check_size(self, name: str, end: int) -> None:
        """Check the size of a file whose last piece ends at ``end``."""
        file = self._folder / name
        with file_errors(_CANNOT):
            size = file.stat().st_size
            if size < end:
                raise damaged(file, f"it is cut short: expected {end} bytes, got {size}")
            if self._sums is not None:
                self._sums.check_size(file)

    def check(self, name: str, offset: int, data: bytes) -> None:
        """Check a piece of a file."""
        if self._sums is not None:
            self._sums.check(self._folder / name, offset, data)
            self._known.setdefault(name, set()).add(offset)

    def check_rest(self) -> None:
        """Read and check all pieces of its files that were not checked yet."""
        if self._sums is None:
            return
        for name in self._sums.files:
            with file_errors(_CANNOT):
                self._sums.check_file(self._folder / name, self._known.get(name, ()))
