"""The manifest of a stage, stage.json: everything that a stage writes besides its tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import ldt
from ldt.errors import CheckpointError, TopologyError
from ldt.topology import Topology
from ldt.train.checkpoint.checksums import verify_checksum, with_checksum
from ldt.train.checkpoint.files import MAX_BYTES, damaged, parse_json, read_json
from ldt.train.checkpoint.layout import StorageError, write_synced

__all__ = ["GroupRecord", "OptimizerRecord", "StageManifest"]

FILE = "stage.json"
FORMAT = 3  # format 2 had no checksums


@dataclass(frozen=True)
class GroupRecord:
    """A parameter group of an optimizer: the names of its parameters, and its hyperparameters."""

    params: list[str]
    values: dict[str, Any]


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer's groups and its ``state`` by parameter name. Tensors are stored elsewhere: their value is None."""

    groups: list[GroupRecord]
    state: dict[str, dict[str, list[Any] | None]]


@dataclass(frozen=True)
class StageManifest:
    """The manifest of one stage. All stages of a save have the same ``save_id``.

    ``aliases`` are other names of stored tensors. ``optimizer`` is the record that ``capture`` returns, None without
    an optimizer. ``position`` is the edge's position in its data. Values are JSON types. ``has_checksums`` is False if
    an earlier version wrote it.
    """

    topology: Topology
    stage: int
    step: int
    save_id: str
    aliases: dict[str, str] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    position: Any = None
    has_checksums: bool = True

    def to_bytes(self) -> bytes:
        """Raises CheckpointError if it could not be read back because it is nested too deeply or too large."""
        content = {"format": FORMAT, "ldt": ldt.__version__, "torch": torch.__version__, **asdict(self)}
        del content["has_checksums"]
        data = with_checksum({**content, "topology": self.topology.to_text()})
        if len(data) > MAX_BYTES:
            raise CheckpointError(
                f"a stage's {FILE} would have {len(data)} bytes: at most {MAX_BYTES} are kept there"
            )
        parse_json(Path(FILE), data, _File)
        return data

    def write(self, folder: Path) -> None:
        write_synced(folder / FILE, self.to_bytes())

    @classmethod
    def read(cls, folder: Path) -> StageManifest:
        """Read a manifest. Raises OSError, or CheckpointError naming a file that is invalid or of a later version."""
        file = folder / FILE
        data, anything = read_json(file, dict[str, Any])
        if anything.get("format") not in (2, FORMAT):
            raise StorageError.of(
                file,
                f"has format {str(anything.get('format'))[:20]}, this version of ldt reads formats 2 and {FORMAT}: it "
                f"was written by ldt {str(anything.get('ldt'))[:20]!r}, use that one",
            )
        found = parse_json(file, data, _File)
        verify_checksum(data, file, required=found.format == FORMAT)
        try:
            topology = Topology.from_text(found.topology)
        except TopologyError as error:
            raise damaged(file, str(error)) from error
        if found.stage >= topology.num_stages:
            raise damaged(file, f"{found.topology} has no stage {found.stage}")
        return cls(
            topology,
            found.stage,
            found.step,
            found.save_id,
            found.aliases,
            found.optimizer,
            found.extra,
            found.position,
            has_checksums=found.format == FORMAT,
        )


@dataclass(frozen=True)
class _File:
    """The schema of the file."""

    format: Literal[2, 3]
    ldt: str
    torch: str
    topology: str
    stage: int
    step: int
    save_id: str
    aliases: dict[str, str]
    optimizer: OptimizerRecord | None
    extra: dict[str, Any]
    position: Any
    crc32: str = ""
