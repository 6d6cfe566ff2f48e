"""Why two parameters that begin equal are one weight, or why they are only alike: by what holds them, and where."""

from __future__ import annotations

import ctypes
import gc
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ldt.runtime.common.untrusted import as_str_list
from ldt.runtime.model.digests import components
from ldt.runtime.model.module_state import HeldTensor, unwrapped_name

__all__ = ["Evidence", "Witness", "content_of", "evidence_by_key", "hashed", "is_one_weight"]

_ROWS, _COLUMNS = 4, 8  # of each parameter, that are compared
_SEEN, _LEAST = 16, 8  # elements of two dimensions of a parameter, or of one
_TURNS = 0.4  # of numbers that were drawn, two thirds are larger or smaller than both of their neighbours


@dataclass(frozen=True)
class Evidence:
    """Of a parameter: its ``label``, and digests of the modules around it, from the one that has it to its chunk.

    ``sizes`` are their numbers of parameters. ``elsewhere`` has digests of modules of this process that hold the very
    same parameter beside its chunk, and ``drawn`` says that its values look random.
    """

    label: str
    chunk: str = ""
    around: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    drawn: bool = False

    def to_json(self) -> list[Any]:
        return [[self.label, self.chunk], self.around, self.sizes, self.elsewhere, self.drawn]

    @classmethod
    def from_json(cls, value: Any) -> Evidence:
        """Raises TypeError or ValueError for anything else."""
        names, around, sizes, elsewhere, drawn = value
        label, chunk = as_str_list(names)
        return cls(
            label, chunk, as_str_list(around), list(map(int, sizes)), as_str_list(elsewhere), bool(drawn)
        )


def evidence_by_key(value: Any) -> dict[str, Evidence]:
    """Raises AttributeError, TypeError or ValueError for anything else."""
    return {str(key): Evidence.from_json(found) for key, found in value.items()}


def is_one_weight(one: Evidence, other: Evidence, *, named: bool) -> bool:
    """Whether two that begin equal were one.

    They were if a process that has one of them has it in the chunk of the other, too. Where that does not show, as a
    wrapper has replaced it, or the rest of the model is gone, they were if their values look random and the modules
    that hold them differ in something else: copies of a layer are equal as a whole. Not if both are ``named``
    otherwise in the whole model.
    """
    if one.chunk in other.elsewhere or other.chunk in one.elsewhere:
        return True
    return one.drawn and other.drawn and not named and not _are_copies(one, other)


def _are_copies(one: Evidence, other: Evidence) -> bool:
    """Whether they are in modules that are equal as a whole, and more than a parameter, or all of a chunk."""
    pairs = list(zip(one.around, other.around, strict=False))
    alike = next((level for level, (mine, theirs) in enumerate(pairs) if mine != theirs), len(pairs))
    return alike > 0 and (one.sizes[alike - 1] > 1 or alike == len(one.around) == len(other.around))


class Witness:
    """Of this process, whose ``chunks`` are a pipeline's."""

    def __init__(self, chunks: Mapping[int, nn.Module]) -> None:
        self._chunks = chunks
        # By ``id``, which lasts as long as they are held.
        self._lines: dict[int, tuple[torch.Tensor, str]] = {}
        self._digests: dict[int, tuple[nn.Module, str]] = {}

    def of(self, wanted: Mapping[str, HeldTensor]) -> dict[str, Evidence]:
        """By key what there is on each."""
        elsewhere = self._elsewhere({id(held.tensor) for held in wanted.values()}) if wanted else {}
        return {key: self._on(held, elsewhere.get(id(held.tensor), ())) for key, held in wanted.items()}

    def _on(self, held: HeldTensor, elsewhere: Iterable[str]) -> Evidence:
        chunk = self._chunks[int(held.where.removeprefix("chunk "))]
        around = list(self._around(chunk, held.name))
        return Evidence(
            f"{held.label} ({held.describe()})",
            self._of(chunk),
            [digest for digest, _ in around],
            [size for _, size in around],
            sorted(elsewhere),
            _is_drawn(held.tensor),
        )

    def _around(self, chunk: nn.Module, name: str) -> Iterator[tuple[str, int]]:
        path = name.split(".")[:-1]
        for length in range(len(path), -1, -1):
            module = chunk.get_submodule(".".join(path[:length]))
            kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
            yield hashed(f"{kind.__qualname__} {self._of(module)}".encode()), len(list(module.parameters()))

    def _of(self, module: nn.Module) -> str:
        """A digest of what the parameters of a module are called and how they begin."""
        if id(module) not in self._digests:
            lines = (f"{unwrapped_name(name)} {self._line(p)}" for name, p in module.named_parameters())
            self._digests[id(module)] = module, hashed("\n".join(sorted(lines)).encode())
        return self._digests[id(module)][1]

    def _line(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self._lines:
            self._lines[id(parameter)] = parameter, content_of(parameter) or str(list(parameter.shape))
        return self._lines[id(parameter)][1]

    def _elsewhere(self, parameters: set[int]) -> dict[int, set[str]]:
        """By the ``id`` of those of ``parameters`` that modules beside the chunks hold, what these are."""
        chunks = [(self._of(chunk), chunk) for chunk in self._chunks.values()]
        inside = {id(module) for _, chunk in chunks for module in chunk.modules()}
        found: dict[int, set[str]] = {}

        def note(module: nn.Module, digest: str) -> None:
            for parameter in {id(p) for p in module.parameters()} & parameters:
                found.setdefault(parameter, set()).add(digest)

        def note_beside(module: nn.Module) -> None:
            if id(module) not in inside and not parameters.isdisjoint(map(id, module.parameters())):
                digest = self._of(module)
                wrapped = {id(chunk) for own, chunk in chunks if own == digest}
                if wrapped.isdisjoint(map(id, module.modules())):
                    note(module, digest)

        for module in _modules_alive():
            with suppress(Exception):  # not this pipeline's: it may be half made, or have a mind of its own
                note_beside(module)
        for digest, chunk in chunks:
            if _is_listed_twice(chunk):
                note(chunk, digest)
        return found


def _modules_alive() -> Iterator[nn.Module]:
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module) and "_modules" in vars(thing):
            yield thing


def _is_listed_twice(module: nn.Module) -> bool:
    """Whether it is two of the modules of a list, such as that of a model's chunks."""
    for holder in gc.get_referrers(module):
        things: Iterable[Any] = holder.values() if type(holder) is dict else holder
        if type(holder) in (list, tuple, dict) and sum(thing is module for thing in list(things)) > 1:
            return True
    return False


@torch.no_grad()
def content_of(tensor: torch.Tensor) -> str | None:
    """A digest of the first elements of the first rows, which a shard of the first rank has, too; None without any.

    And where they say nothing, as those that are constant or repeat themselves.
    """
    part = next(iter(components(tensor)), None)
    if part is None:
        return None
    part = part.squeeze() if 1 in part.shape else part
    rows = part[:_ROWS] if part.dim() > 1 else part.reshape(-1)[: _ROWS * _COLUMNS]
    if rows.dim() > 1:
        rows = (rows.flatten(1) if rows.dim() > 2 else rows)[:, :_COLUMNS]
    rows = rows.cpu().contiguous()
    data = ctypes.string_at(rows.data_ptr(), rows.nbytes)  # in one call: there are many parameters
    width = len(data) // max(1, len(rows))
    if len({data[start : start + width] for start in range(0, len(data), width or 1)}) < 2:
        return None
    return hashed(f"{tensor.dtype} {list(tensor.shape)}".encode() + data)


@torch.no_grad()
def _is_drawn(tensor: torch.Tensor) -> bool:
    """Whether its values look random: not like ``eye``, ``arange``, or what grows or falls along a dimension."""
    part = next(iter(components(tensor)), torch.empty(0))
    part = (torch.view_as_real(part).flatten(-2) if part.is_complex() else part).squeeze()
    values = (
        (part.flatten(1) if part.dim() > 1 else part.reshape(1, -1))[:_SEEN, : _SEEN * _SEEN].double().cpu()
    )
    if values.numel() < _LEAST or torch.unique(values).numel() * 4 < values.numel():
        return False
    for dim in (0, 1):
        steps = values.diff(dim=dim)
        count = steps.shape[dim]
        if count >= _LEAST - 1:
            turns = steps.narrow(dim, 1, count - 1) * steps.narrow(dim, 0, count - 1) < 0
            if turns.double().mean() < _TURNS:
                return False
    return True


def hashed(data: bytes) -> str:
    """16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
