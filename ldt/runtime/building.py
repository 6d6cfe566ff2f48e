"""What each rank tells all others when a pipeline is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from ldt.runtime.received import texts, texts_by_name

__all__ = ["Own"]


@dataclass
class Own:
    """By chunk the parts of ``fully_shard`` and the metadata that shapes depend on; all metadata that chunks take."""

    sharding: Mapping[str, list[str]] = field(default_factory=dict)
    metadata: list[str] = field(default_factory=list)
    reads: Mapping[str, list[str]] = field(default_factory=dict)
    scaled: bool = False  # by a GradScaler
    weights: Mapping[str, str] = field(default_factory=dict)  # digests by part

    def to_json(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, value: Any) -> Own:
        """Raises TypeError or ValueError for anything else."""
        sharding, metadata, reads, scaled, weights = value
        return cls(
            _by_chunk(sharding), texts(metadata), _by_chunk(reads), bool(scaled), texts_by_name(weights)
        )


def _by_chunk(told: Any) -> dict[str, list[str]]:
    return {str(int(chunk)): texts(found) for chunk, found in told.items()}
