"""What a stage writes beside its tensors, as one JSON file: stage.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import ldt
from ldt.errors import CheckpointError
from ldt.topology import Topology
from ldt.train.checkpoint.layout import write_synced

__all__ = ["StageRecord", "read_json"]

FILE = "stage.json"
FORMAT = 2


@dataclass(frozen=True)
class StageRecord:
    """Of one stage in one save, whose stages all have its ``save_id``.

    ``aliases`` are further names of tensors, by which they are not stored again. ``optimizer`` is what ``capture``
    gives, None without one. ``position`` is the edge's place in its data. Values are types of JSON.
    """

    topology: Topology
    stage: int
    step: int
    save_id: str
    aliases: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    position: Any = None

    def write(self, folder: Path) -> None:
        content = {
            "format": FORMAT,
            "ldt": ldt.__version__,
            "torch": torch.__version__,
            **vars(self),
            "topology": self.topology.to_text(),
        }
        write_synced(folder / FILE, json.dumps(content, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> StageRecord:
        """Raises CheckpointError naming the file if it is none of these, or of a later version; OSError."""
        file = folder / FILE
        content = read_json(file)
        if content.get("format") != FORMAT:
            raise CheckpointError(
                f"{file} has format {content.get('format')!r}, this version of ldt reads format {FORMAT}: it was "
                f"written by ldt {content.get('ldt')!r}, use that one"
            )
        match content:
            case {
                "topology": str(topology),
                "stage": int(stage),
                "step": int(step),
                "save_id": str(save_id),
                "aliases": dict(aliases),
                "optimizer": dict() | None as optimizer,
                "extra": dict(extra),
                "position": position,
            }:
                shape = Topology.from_text(topology)
                if not 0 <= stage < shape.num_stages:
                    raise CheckpointError(f"{file} is damaged: {topology} has no stage {stage}")
                return cls(shape, stage, step, save_id, aliases, optimizer, extra, position)
        raise CheckpointError(f"{file} is damaged: it lacks what every stage writes")


def read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``. Raises CheckpointError if there is none in it; OSError."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is damaged: expected a JSON object, got {type(content).__name__}")
    return content
