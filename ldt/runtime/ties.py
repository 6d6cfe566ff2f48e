"""Whether a parameter of the model is on two stages, or is two where it should be one: each would train apart."""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ldt.errors import LdtError
from ldt.runtime.digests import components
from ldt.runtime.held import Held, NamesItself, unwrapped_name
from ldt.runtime.mesh import Mesh
from ldt.runtime.received import plain, texts_by_name

__all__ = ["Ties"]

_ROWS, _COLUMNS = 4, 8  # of each parameter, that are looked at
_NAME, _CONTENT = "n", "c"  # what a mark is of
Marks = Mapping[str, Sequence[str]]  # by chunk


class _Place(NamedTuple):
    rank: int
    chunk: str


class Ties:
    """The marks of this rank's trainable parameters: what they are called in the whole model, and how they begin.

    A parameter that several chunks of a rank hold has its marks once, with the first. A second tensor of one name, or
    of one content in another chunk, is one weight that trains in two places. Contents that say nothing are left out:
    those that are constant or repeat themselves, and those that a chunk has twice, as copies of one layer do.
    """

    def __init__(self, mesh: Mesh, modules: Mapping[int, nn.Module]) -> None:
        self._mesh = mesh
        first = mesh.topology.ranks_of_stage(mesh.stage)[0] == mesh.rank  # it speaks for its stage
        self._held = dict(_trainable(modules)) if first else {}
        self._marks: dict[str, list[str]] = {}
        self._labels: dict[tuple[str, str], str] = {}
        contents = _contents([held.tensor for held in self._held.values()])
        for held, content in zip(self._held.values(), contents, strict=True):
            chunk = held.where.removeprefix("chunk ")
            for mark in filter(None, (_name_mark(modules[int(chunk)], held), content)):
                self._marks.setdefault(chunk, []).append(mark)
                known = self._labels.get((chunk, mark))
                label = f"{held.label} ({held.describe()})"
                self._labels[chunk, mark] = label if known is None else f"{known} and {label}"

    def tell(self) -> Marks:
        return self._marks

    def compare(self, told: Sequence[Marks], *, contents: bool) -> None:
        """Raise LdtError on every rank, naming both, if a weight is on two stages or a tie is broken.

        ``told`` is what each rank told; ``contents`` says whether equal ones count, or only names.
        """
        places = next(_shared(told, contents), None)
        if places is None:
            return
        mark, found = places
        mine = {
            place.chunk: self._labels[place.chunk, mark] for place in found if place.rank == self._mesh.rank
        }
        with self._mesh.collective("Pipeline()"):
            labels: list[dict[str, str]] = self._mesh.control.gather(mine, texts_by_name)
        raise LdtError(
            _sentence(self._mesh, mark, found, [labels[rank].get(chunk, "?") for rank, chunk in found])
        )


def _trainable(modules: Mapping[int, nn.Module]) -> Iterator[tuple[int, Held]]:
    """Each parameter once, by its ``id``."""
    seen: set[int] = set()
    for index, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield id(parameter), Held(f"chunk {index}", name, parameter)


def _name_mark(chunk: nn.Module, held: Held) -> str | None:
    if not isinstance(chunk, NamesItself):
        return None
    return _NAME + _hashed(chunk.whole_model_name(unwrapped_name(held.name)).encode())


@torch.no_grad()
def _contents(tensors: Iterable[torch.Tensor]) -> list[str | None]:
    """A mark for the first elements of the first rows of each, which a shard of the first rank has, too."""
    return [next((_content(tensor, part) for part in components(tensor)), None) for tensor in tensors]


def _content(tensor: torch.Tensor, part: torch.Tensor) -> str | None:
    part = part.squeeze() if 1 in part.shape else part
    rows = part[:_ROWS] if part.dim() > 1 else part.reshape(-1)[: _ROWS * _COLUMNS]
    if rows.dim() > 1:
        rows = (rows.flatten(1) if rows.dim() > 2 else rows)[:, :_COLUMNS]
    rows = rows.cpu().contiguous()
    data = ctypes.string_at(rows.data_ptr(), rows.nbytes)  # in one call: there are many parameters
    width = len(data) // max(1, len(rows))
    if len({data[start : start + width] for start in range(0, len(data), width or 1)}) < 2:
        return None
    return _CONTENT + _hashed(f"{tensor.dtype} {list(tensor.shape)}".encode() + data)


def _hashed(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _shared(told: Sequence[Marks], contents: bool) -> Iterator[tuple[str, list[_Place]]]:
    """Marks of several tensors, and where these are."""
    found: dict[str, list[_Place]] = {}
    for rank, marks in enumerate(told):
        for chunk, of_chunk in marks.items():
            for mark, number in Counter(of_chunk).items():
                found.setdefault(mark, []).extend([_Place(rank, chunk)] * number)
    for mark, places in found.items():
        is_content = mark.startswith(_CONTENT)
        if len(places) > 1 and not (is_content and (not contents or len(set(places)) < len(places))):
            yield mark, list(dict.fromkeys(places))


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
