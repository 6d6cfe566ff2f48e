"""What each rank tells all others when a pipeline is built, and what they agree on of their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from torch import nn

from ldt.runtime.mesh import Mesh
from ldt.runtime.received import texts, texts_by_name
from ldt.runtime.ties import Ties
from ldt.runtime.weights import Weights

__all__ = ["Own", "WeightAgreement", "WeightOptions"]


@dataclass
class Own:
    """By chunk the parts of ``fully_shard`` and the metadata that shapes depend on; all metadata that chunks take."""

    sharding: Mapping[str, list[str]] = field(default_factory=dict)
    metadata: list[str] = field(default_factory=list)
    reads: Mapping[str, list[str]] = field(default_factory=dict)
    scaled: bool = False  # by a GradScaler
    weights: Mapping[str, str] = field(default_factory=dict)  # digests by part
    marks: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of parameters, by chunk

    def to_json(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, value: Any) -> Own:
        """Raises TypeError or ValueError for anything else."""
        sharding, metadata, reads, scaled, weights, marks = value
        return cls(
            _by_chunk(sharding),
            texts(metadata),
            _by_chunk(reads),
            bool(scaled),
            texts_by_name(weights),
            _by_chunk(marks),
        )


def _by_chunk(told: Any) -> dict[str, list[str]]:
    return {str(int(chunk)): texts(found) for chunk, found in told.items()}


@dataclass(frozen=True)
class WeightOptions:
    """What ``Pipeline`` was told about weights: the same on every rank."""

    check_weights: bool = True
    sync_weights: bool = False
    allow_equal_weights: bool = False
    sync_buffers: bool = True

    def same(self) -> dict[str, str]:
        """For ``agree``."""
        return {f"values of {name}": str(bool(value)) for name, value in asdict(self).items()}


class WeightAgreement:
    """What all ranks must agree on of the weights of this one's ``modules``, and of its loss function."""

    def __init__(
        self, mesh: Mesh, modules: Mapping[int, nn.Module], of_loss: nn.Module | None, options: WeightOptions
    ) -> None:
        self._options = options
        places = {f"chunk {index}": module for index, module in modules.items()}
        if of_loss is not None:
            places["loss_fn"] = of_loss
        compares = options.check_weights or options.sync_weights
        self._weights = Weights(mesh, places if compares else {}, values=not options.sync_weights)
        self._ties = Ties(mesh, modules if options.check_weights else {})

    def tell(self, own: Own) -> None:
        own.weights, own.marks = self._weights.tell(), self._ties.tell()

    def settle(self, answers: Sequence[Own]) -> None:
        """Raise LdtError on every rank if weights differ that must be equal, or one is in two places; or send them."""
        self._weights.compare([answer.weights for answer in answers])
        self._ties.compare(
            [answer.marks for answer in answers], contents=not self._options.allow_equal_weights
        )
        if self._options.sync_weights:
            self._weights.send()
