"""Detects a weight that lives on two stages, or was split into two tensors: the copies would diverge."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from ldt.errors import LdtError
from ldt.runtime.common.peer_messages import plain
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.module_state import HasWholeModelNames, HeldTensor, unwrapped_name
from ldt.runtime.model.tie_evidence import (
    Evidence,
    EvidenceCollector,
    content_digest,
    evidence_by_key,
    is_one_weight,
    short_hash,
)

__all__ = ["Ties"]

logger = logging.getLogger(__name__)

_NAME, _CONTENT = "n", "c"  # prefixes of marks
Marks = Mapping[str, Sequence[str]]  # by chunk


class _Location(NamedTuple):
    rank: int
    chunk: str


class Ties:
    """Marks this rank's trainable parameters with hashes of their name in the whole model and of their first values.

    A parameter held by several chunks of a rank is marked once, with the first chunk. Two tensors of one name are one
    weight that would train twice. Two tensors of equal content in different chunks may be: ``is_one_weight`` decides.
    Content that identifies nothing is skipped: constants, repeating rows, and content that a chunk has twice, as in
    copies of a layer. ``call`` names the call that compares the marks.
    """

    def __init__(self, mesh: Mesh, modules: Mapping[int, nn.Module], call: str = "Pipeline()") -> None:
        self._mesh = mesh
        self._call = call
        self._modules = modules
        self._marks: dict[str, list[str]] = {}
        self._held: dict[str, dict[str, HeldTensor]] = {}  # by chunk and mark; the first of them
        first = (
            mesh.topology.ranks_of_stage(mesh.stage)[0] == mesh.rank
        )  # marks the weights of the whole stage
        for index, held in _trainable(modules) if first else ():
            content = content_digest(held.tensor)
            for mark in filter(None, (_name_mark(modules[index], held), content and _CONTENT + content)):
                self._marks.setdefault(str(index), []).append(mark)
                self._held.setdefault(str(index), {}).setdefault(mark, held)

    def marks(self) -> Marks:
        return self._marks

    def compare(self, gathered: Sequence[Marks], *, contents: bool) -> None:
        """Raise LdtError on every rank, naming both tensors, if a weight is on two stages or a tie is broken.

        ``gathered`` has the marks of every rank. Without ``contents`` only names are compared. Pairs that begin equal
        but are two weights are logged by the rank that holds the first.
        """
        pairs = list(_pairs(gathered, contents))
        if not pairs:
            return
        found = self._gather(pairs)
        alike = []
        for mark, locations in pairs:
            evidence = [
                found[location.rank].get(_key(location, mark), Evidence("?")) for location in locations
            ]
            named = all(_is_named(gathered, location) for location in locations)
            if mark.startswith(_NAME) or is_one_weight(*evidence, named=named):
                raise LdtError(_error_text(self._mesh, mark, locations, [one.label for one in evidence]))
            alike += [] if named or locations[0].rank != self._mesh.rank else [evidence]
        if alike:
            one, other = (plain(evidence.label) for evidence in alike[0])
            logger.warning(
                "%s and %s, and %d other pairs, begin equal. They are treated as different weights and train "
                "independently: if they are one weight, keep it in one chunk",
                *(one, other, len(alike) - 1),
            )

    def _gather(self, pairs: Sequence[tuple[str, Sequence[_Location]]]) -> Sequence[Mapping[str, Evidence]]:
        """Gather the evidence for ``pairs``, by rank and key."""
        local = {
            _key(location, mark): self._held[location.chunk][mark]
            for mark, locations in pairs
            for location in locations
            if location.rank == self._mesh.rank
        }
        with self._mesh.collective(self._call):
            evidence = {
                key: one.to_json() for key, one in EvidenceCollector(self._modules).collect(local).items()
            }
            found: list[dict[str, Evidence]] = self._mesh.control.all_gather(evidence, evidence_by_key)
        return found


def _trainable(modules: Mapping[int, nn.Module]) -> Iterator[tuple[int, HeldTensor]]:
    """Each parameter once, with its chunk."""
    seen: set[int] = set()
    for index, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield index, HeldTensor(f"chunk {index}", name, parameter)


def _name_mark(chunk: nn.Module, held: HeldTensor) -> str | None:
    if not isinstance(chunk, HasWholeModelNames):
        return None
    return _NAME + short_hash(chunk.whole_model_name(unwrapped_name(held.name)).encode())


def _is_named(gathered: Sequence[Marks], location: _Location) -> bool:
    """Whether the chunk provides names in the whole model."""
    return any(mark.startswith(_NAME) for mark in gathered[location.rank].get(location.chunk, ()))


def _key(location: _Location, mark: str) -> str:
    return f"{location.chunk}/{mark}"


def _pairs(gathered: Sequence[Marks], contents: bool) -> Iterator[tuple[str, tuple[_Location, _Location]]]:
    """Yield each pair of tensors that share a mark, with the mark; names first."""
    found: dict[str, list[_Location]] = {}
    for rank, marks in enumerate(gathered):
        for chunk, of_chunk in marks.items():
            for mark, number in Counter(of_chunk).items():
                found.setdefault(mark, []).extend([_Location(rank, chunk)] * number)
    for mark in sorted(found, key=lambda mark: mark.startswith(_CONTENT)):
        locations = found[mark]
        compared = mark.startswith(_NAME) or (contents and len(set(locations)) == len(locations))
        for one, other in itertools.combinations(locations, 2) if compared else ():
            yield mark, (one, other)


def _error_text(mesh: Mesh, mark: str, locations: Sequence[_Location], labels: Sequence[str]) -> str:
    stages = [mesh.topology.node_of(location.rank).stage for location in locations]
    pairs = zip(labels, stages, strict=True)
    who = " and ".join(f"{plain(label)} on stage {stage}" for label, stage in pairs)
    advice = (
        "two stages hold it, and their copies would diverge: keep it on one stage"
        if len(set(stages)) > 1
        else "fully_shard, parallelize_module or a copy split it into two tensors, which would diverge: wrap a module "
        "that has both, leave them unwrapped, or tie them again"
    )
    if mark.startswith(_NAME):
        return f"{who} are one weight of the model: {advice}"
    return (
        f"{who} begin equal, as if one weight of the model were in both chunks: {advice}. If they are different "
        "weights, initialize each from its own seed, or pass Pipeline(allow_equal_weights=True)"
    )
