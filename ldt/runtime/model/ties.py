"""Whether a parameter of the model is on two stages, or is two where it should be one: each would train apart."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from ldt.errors import LdtError
from ldt.runtime.common.untrusted import plain
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.module_state import HeldTensor, NamesItself, unwrapped_name
from ldt.runtime.model.tie_evidence import (
    Evidence,
    Witness,
    content_of,
    evidence_by_key,
    hashed,
    is_one_weight,
)

__all__ = ["Ties"]

logger = logging.getLogger(__name__)

_NAME, _CONTENT = "n", "c"  # what a mark is of
Marks = Mapping[str, Sequence[str]]  # by chunk


class _Place(NamedTuple):
    rank: int
    chunk: str


class Ties:
    """The marks of this rank's trainable parameters: what they are called in the whole model, and how they begin.

    A parameter that several chunks of a rank hold has its marks once, with the first. A second tensor of one name is
    one weight that trains in two places. So may be a second one of one content in another chunk: ``is_one_weight``
    decides. Contents that say nothing are left out: those that are constant or repeat themselves, and those that a
    chunk has twice, as copies of one layer do. ``call`` is the one that compares them.
    """

    def __init__(self, mesh: Mesh, modules: Mapping[int, nn.Module], call: str = "Pipeline()") -> None:
        self._mesh = mesh
        self._call = call
        self._modules = modules
        self._marks: dict[str, list[str]] = {}
        self._held: dict[str, dict[str, HeldTensor]] = {}  # by chunk and mark; the first of them
        first = mesh.topology.ranks_of_stage(mesh.stage)[0] == mesh.rank  # it speaks for its stage
        for index, held in _trainable(modules) if first else ():
            content = content_of(held.tensor)
            for mark in filter(None, (_name_mark(modules[index], held), content and _CONTENT + content)):
                self._marks.setdefault(str(index), []).append(mark)
                self._held.setdefault(str(index), {}).setdefault(mark, held)

    def tell(self) -> Marks:
        return self._marks

    def compare(self, told: Sequence[Marks], *, contents: bool) -> None:
        """Raise LdtError on every rank, naming both, if a weight is on two stages or a tie is broken.

        ``told`` is what each rank told; ``contents`` says whether equal ones count, or only names. Those that are only
        alike are logged, by a rank that has one.
        """
        pairs = list(_pairs(told, contents))
        if not pairs:
            return
        found = self._gather(pairs)
        alike = []
        for mark, places in pairs:
            evidence = [found[place.rank].get(_key(place, mark), Evidence("?")) for place in places]
            named = all(_is_named(told, place) for place in places)
            if mark.startswith(_NAME) or is_one_weight(*evidence, named=named):
                raise LdtError(_sentence(self._mesh, mark, places, [one.label for one in evidence]))
            alike += [] if named or places[0].rank != self._mesh.rank else [evidence]
        if alike:
            one, other = (plain(evidence.label) for evidence in alike[0])
            logger.warning(
                "%s and %s, and %d other pairs, begin equal. They are taken for different weights, which train by "
                "themselves: if they are one, give it to one chunk",
                *(one, other, len(alike) - 1),
            )

    def _gather(self, pairs: Sequence[tuple[str, Sequence[_Place]]]) -> Sequence[Mapping[str, Evidence]]:
        """By rank and key what each knows of its own of ``pairs``."""
        mine = {
            _key(place, mark): self._held[place.chunk][mark]
            for mark, places in pairs
            for place in places
            if place.rank == self._mesh.rank
        }
        with self._mesh.collective(self._call):
            evidence = {key: one.to_json() for key, one in Witness(self._modules).of(mine).items()}
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
    if not isinstance(chunk, NamesItself):
        return None
    return _NAME + hashed(chunk.whole_model_name(unwrapped_name(held.name)).encode())


def _is_named(told: Sequence[Marks], place: _Place) -> bool:
    """Whether its chunk knows names in the whole model."""
    return any(mark.startswith(_NAME) for mark in told[place.rank].get(place.chunk, ()))


def _key(place: _Place, mark: str) -> str:
    return f"{place.chunk}/{mark}"


def _pairs(told: Sequence[Marks], contents: bool) -> Iterator[tuple[str, tuple[_Place, _Place]]]:
    """Marks of several tensors, and where two of these are; those of names first."""
    found: dict[str, list[_Place]] = {}
    for rank, marks in enumerate(told):
        for chunk, of_chunk in marks.items():
            for mark, number in Counter(of_chunk).items():
                found.setdefault(mark, []).extend([_Place(rank, chunk)] * number)
    for mark in sorted(found, key=lambda mark: mark.startswith(_CONTENT)):
        places = found[mark]
        counts = mark.startswith(_NAME) or (contents and len(set(places)) == len(places))
        for one, other in itertools.combinations(places, 2) if counts else ():
            yield mark, (one, other)


def _sentence(mesh: Mesh, mark: str, places: Sequence[_Place], labels: Sequence[str]) -> str:
    stages = [mesh.topology.node_of(place.rank).stage for place in places]
    pairs = zip(labels, stages, strict=True)
    who = " and ".join(f"{plain(label)} on stage {stage}" for label, stage in pairs)
    apart = (
        "two stages hold it, and each would train its own: give it to one of them"
        if len(set(stages)) > 1
        else "it was made two, by fully_shard, parallelize_module or a copy, and each would train by itself: wrap a "
        "module that has both, leave them as they are, or tie them again"
    )
    if mark.startswith(_NAME):
        return f"{who} are one weight of the model: {apart}"
    return (
        f"{who} begin equal, as one weight of the model does that is in both chunks: {apart}. If they are different "
        "weights, draw each from a seed of its own, or give Pipeline(allow_equal_weights=True)"
    )
