"""Sums of what a rank wrote, piece by piece, so that whoever reads a piece can tell whether it is what was written.

A sum is a CRC-32: any damage within 32 bits is found, other damage but for one in four billion.
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

__all__ = ["Checksums", "sealed", "unsealed"]

FILE = "checksums.json"  # in the folder of a rank
_SEAL = b',\n "crc32": "'
_AT_ONCE = 16 << 20  # bytes
Places = dict[str, list[tuple[int, int]]]  # offset and length of each piece, by the name of its file


def sealed(content: dict[str, Any]) -> bytes:
    """An object of JSON that ends with a sum of all before it."""
    body = json.dumps(content, indent=1).encode().removesuffix(b"\n}")
    return body + _SEAL + _tail(body)


def unsealed(data: bytes, file: Path, *, always: bool) -> None:
    """Raise CheckpointError unless the sum at the end of ``data`` is right, or it has none and need not ``always``."""
    body, seal, tail = data.rpartition(_SEAL)
    if (seal or always) and tail != _tail(body):
        raise damaged(file, "it is not what was written")


def _tail(body: bytes) -> bytes:
    return f'{zlib.crc32(body):08x}"\n}}'.encode()


@dataclass(frozen=True)
class Checksums:
    """Of files in the folder of a rank, from their beginning to their end: offset, length and sum of each piece."""

    format: Literal[1]
    save_id: str
    files: dict[str, list[tuple[int, int, int]]]
    crc32: str = ""

    @classmethod
    def write(cls, folder: Path, save_id: str, places: Places) -> None:
        """For the files of ``places``, and as one piece the others in ``folder``. Raises OSError."""
        whole = {file.name: [(0, file.stat().st_size)] for file in folder.iterdir()}
        files = {}
        for name, pieces in {**whole, **places}.items():
            assert sum(length for _, length in pieces) == whole[name][0][1], (
                f"bytes of {name} are of no piece"
            )
            files[name] = list(_sums(folder / name, sorted(pieces)))
        content = asdict(cls(1, save_id, files))
        del content["crc32"]
        write_synced(folder / FILE, sealed(content))

    @classmethod
    def read(cls, folder: Path, save_id: str) -> Checksums:
        """Raises CheckpointError if they are damaged, or of another save; OSError."""
        file = folder / FILE
        data, found = read_json(file, cls)
        unsealed(data, file, always=True)
        if found.save_id != save_id:
            raise damaged(file, "it is of another save than its stage")
        return found

    def check_size(self, file: Path) -> None:
        """Raises CheckpointError that names ``file`` if it is shorter or longer than it was; OSError."""
        expected, size = sum(length for length, _ in self._pieces(file).values()), file.stat().st_size
        if size != expected:
            raise damaged(file, f"expected {expected} bytes, got {size}")

    def check(self, file: Path, offset: int, data: bytes) -> None:
        """Raises CheckpointError that names ``file`` unless ``data`` is the piece at ``offset``."""
        self._compare(file, offset, len(data), zlib.crc32(data))

    def check_file(self, file: Path, known: Collection[int] = ()) -> None:
        """Read the pieces of ``file`` but for those whose offsets are ``known``. Raises as ``check`` does; OSError."""
        self.check_size(file)
        pieces = [(at, length) for at, (length, _) in self._pieces(file).items() if at not in known]
        for piece in _sums(file, pieces):
            self._compare(file, *piece)

    def _compare(self, file: Path, offset: int, length: int, crc32: int) -> None:
        if self._pieces(file).get(offset) != (length, crc32):
            raise damaged(file, f"the {length} bytes from byte {offset} on are not those that were written")

    def _pieces(self, file: Path) -> dict[int, tuple[int, int]]:
        if file.name not in self._by_offset:
            raise damaged(file.parent / FILE, f"it has nothing of {file.name}")
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
    while length > 0 and (data := stream.read(min(length, _AT_ONCE))):
        total = zlib.crc32(data, total)
        length -= len(data)
    return total
