"""Checksums of the files that a rank wrote, piece by piece, so that a reader can verify the pieces it reads.

A checksum is a CRC-32. It detects all damage within 32 bits, and misses other damage once in four billion cases.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ldt.train.checkpoint.files import damaged, read_json
from ldt.train.checkpoint.layout import write_synced

__all__ = ["Checksums", "verify_checksum", "with_checksum"]

FILE = "checksums.json"  # in the folder of a rank
_KEY = b',\n "crc32": "'
_READ_BYTES = 16 << 20
Pieces = dict[str, list[tuple[int, int]]]  # offset and length of each piece, by file name


def with_checksum(content: dict[str, Any]) -> bytes:
    """Return a JSON object that ends with a checksum of all bytes before it."""
    body = json.dumps(content, indent=1).encode().removesuffix(b"\n}")
    return body + _KEY + _tail(body)


def verify_checksum(data: bytes, file: Path, *, required: bool) -> None:
    """Raise CheckpointError if the checksum at the end of ``data`` is wrong, or missing and ``required``."""
    body, key, tail = data.rpartition(_KEY)
    if (key or required) and tail != _tail(body):
        raise damaged(file, "it is not what was written")


def _tail(body: bytes) -> bytes:
    return f'{zlib.crc32(body):08x}"\n}}'.encode()


@dataclass(frozen=True)
class Checksums:
    """Offset, length and checksum of each piece of the files in a rank's folder. Pieces cover whole files."""

    format: Literal[1]
    save_id: str
    files: dict[str, list[tuple[int, int, int]]]
    crc32: str = ""

    @classmethod
    def write(cls, folder: Path, save_id: str, pieces_of: Pieces) -> None:
        """Write the checksums of the files in ``folder``. A file not in ``pieces_of`` is one piece. Raises OSError."""
        whole = {file.name: [(0, file.stat().st_size)] for file in folder.iterdir()}
        files = {}
        for name, pieces in {**whole, **pieces_of}.items():
            assert sum(length for _, length in pieces) == whole[name][0][1], (
                f"the pieces of {name} do not cover it"
            )
            files[name] = list(_sums(folder / name, sorted(pieces)))
        content = asdict(cls(1, save_id, files))
        del content["crc32"]
        write_synced(folder / FILE, with_checksum(content))

    @classmethod
    def read(cls, folder: Path, save_id: str) -> Checksums:
        """Read the checksums. Raises OSError, or CheckpointError if they are damaged or of another save."""
        file = folder / FILE
        data, found = read_json(file, cls)
        verify_checksum(data, file, required=True)
        if found.save_id != save_id:
            raise damaged(file, "it is of another save than its stage")
        return found

    def check_size(self, file: Path) -> None:
        """Raises OSError, or CheckpointError naming ``file`` if its size differs from the written one."""
        expected, size = sum(length for length, _ in self._pieces(file).values()), file.stat().st_size
        if size != expected:
            raise damaged(file, f"expected {expected} bytes, got {size}")

    def check(self, file: Path, offset: int, data: bytes) -> None:
        """Raises CheckpointError naming ``file`` unless ``data`` is the piece at ``offset``."""
        self._compare(file, offset, len(data), zlib.crc32(data))

    def check_file(self, file: Path, known: Collection[int] = ()) -> None:
        """Read and check the pieces of ``file`` but those at the offsets ``known``. Raises OSError, or as ``check``."""
        self.check_size(file)
        pieces = [(at, length) for at, (length, _) in self._pieces(file).items() if at not in known]
        for piece in _sums(file, pieces):
            self._compare(file, *piece)

    def _compare(self, file: Path, offset: int, length: int, crc32: int) -> None:
        if self._pieces(file).get(offset) != (length, crc32):
            raise damaged(file, f"the checksum of {length} bytes from byte {offset} on does not match")

    def _pieces(self, file: Path) -> dict[int, tuple[int, int]]:
        if file.name not in self._by_offset:
            raise damaged(file.parent / FILE, f"it has no checksums of {file.name}")
        return self._by_offset[file.name]

    @cached_property
    def _by_offset(self) -> dict[str, dict[int, tuple[int, int]]]:
        return {
            name: {at: (length, crc32) for at, length, crc32 in pieces} for name, pieces in self.files.items()
        }


def _sums(file: Path, pieces: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    with file.open("rb") as stream:
        for offset, length in pieces:
            stream.seek(offset)
            yield offset, length, _sum(stream, length)


def _sum(stream: BinaryIO, length: int) -> int:
    total = 0
    while length > 0 and (data := stream.read(min(length, _READ_BYTES))):
        total = zlib.crc32(data, total)
        length -= len(data)
    return total
