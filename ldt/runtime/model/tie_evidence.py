"""Decides whether two parameters with equal initial values are one weight, from the modules that hold them."""

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

from ldt.runtime.common.peer_messages import as_str_list
from ldt.runtime.model.digests import components
from ldt.runtime.model.module_state import HeldTensor, unwrapped_name

__all__ = [
    "Evidence",
    "EvidenceCollector",
    "content_digest",
    "evidence_by_key",
    "is_one_weight",
    "short_hash",
]

_ROWS, _COLUMNS = 4, 8  # of each parameter, that content_digest reads
_MOST_SEEN, _LEAST = 16, 8  # elements per dimension that _looks_random reads, and that it needs
_LEAST_TURNS = 0.4  # share of local extremes; of random numbers, two thirds are one


@dataclass(frozen=True)
class Evidence:
    """What a rank knows of one of its parameters.

    ``ancestors`` are digests of the modules around it, from its owner up to its chunk, and ``sizes`` their numbers of
    parameters. ``other_holders`` are digests of other modules of this process that hold the same parameter.
    """

    label: str
    chunk: str = ""
    ancestors: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    other_holders: list[str] = field(default_factory=list)
    looks_random: bool = False

    def to_json(self) -> list[Any]:
        return [[self.label, self.chunk], self.ancestors, self.sizes, self.other_holders, self.looks_random]

    @classmethod
    def from_json(cls, value: Any) -> Evidence:
        """Raises TypeError or ValueError for anything else."""
        names, ancestors, sizes, other_holders, looks_random = value
        label, chunk = as_str_list(names)
        return cls(
            label,
            chunk,
            as_str_list(ancestors),
            list(map(int, sizes)),
            as_str_list(other_holders),
            bool(looks_random),
        )


def evidence_by_key(value: Any) -> dict[str, Evidence]:
    """Raises AttributeError, TypeError or ValueError for anything else."""
    return {str(key): Evidence.from_json(found) for key, found in value.items()}


def is_one_weight(one: Evidence, other: Evidence, *, named: bool) -> bool:
    """Whether two parameters with equal initial values were one weight.

    They were if a process that holds one of them also holds it in the other's chunk. That does not show if a wrapper
    replaced the parameter, or if the process freed the rest of the model. Then they count as one weight if their
    values look random and the modules around them differ elsewhere: copies of a layer are equal as a whole. They are
    two weights if both are ``named``, as their names in the whole model differ.
    """
    if one.chunk in other.other_holders or other.chunk in one.other_holders:
        return True
    return one.looks_random and other.looks_random and not named and not _are_copies(one, other)


def _are_copies(one: Evidence, other: Evidence) -> bool:
    """Whether equal modules hold them, each with more than one parameter or a whole chunk."""
    pairs = list(zip(one.ancestors, other.ancestors, strict=False))
    alike = next((level for level, (first, second) in enumerate(pairs) if first != second), len(pairs))
    return alike > 0 and (one.sizes[alike - 1] > 1 or alike == len(one.ancestors) == len(other.ancestors))


class EvidenceCollector:
    """Collects the evidence of this process; ``chunks`` are its chunks of the pipeline."""

    def __init__(self, chunks: Mapping[int, nn.Module]) -> None:
        self._chunks = chunks
        # By ``id``; holding the object keeps its id from being reused.
        self._tensor_lines: dict[int, tuple[torch.Tensor, str]] = {}
        self._digests: dict[int, tuple[nn.Module, str]] = {}

    def collect(self, wanted: Mapping[str, HeldTensor]) -> dict[str, Evidence]:
        """Return the evidence by key."""
        other_holders = self._other_holders({id(held.tensor) for held in wanted.values()}) if wanted else {}
        return {
            key: self._collect(held, other_holders.get(id(held.tensor), ())) for key, held in wanted.items()
        }

    def _collect(self, held: HeldTensor, other_holders: Iterable[str]) -> Evidence:
        chunk = self._chunks[int(held.where.removeprefix("chunk "))]
        ancestors = list(self._ancestors(chunk, held.name))
        return Evidence(
            f"{held.label} ({held.describe()})",
            self._module_digest(chunk),
            [digest for digest, _ in ancestors],
            [size for _, size in ancestors],
            sorted(other_holders),
            _looks_random(held.tensor),
        )

    def _ancestors(self, chunk: nn.Module, name: str) -> Iterator[tuple[str, int]]:
        path = name.split(".")[:-1]
        for length in range(len(path), -1, -1):
            module = chunk.get_submodule(".".join(path[:length]))
            kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
            yield (
                short_hash(f"{kind.__qualname__} {self._module_digest(module)}".encode()),
                len(list(module.parameters())),
            )

    def _module_digest(self, module: nn.Module) -> str:
        """Return a digest of the names and first values of a module's parameters."""
        if id(module) not in self._digests:
            lines = (
                f"{unwrapped_name(name)} {self._parameter_line(p)}" for name, p in module.named_parameters()
            )
            self._digests[id(module)] = module, short_hash("\n".join(sorted(lines)).encode())
        return self._digests[id(module)][1]

    def _parameter_line(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self._tensor_lines:
            self._tensor_lines[id(parameter)] = (
                parameter,
                content_digest(parameter) or str(list(parameter.shape)),
            )
        return self._tensor_lines[id(parameter)][1]

    def _other_holders(self, parameters: set[int]) -> dict[int, set[str]]:
        """Return digests of the modules outside of the chunks that hold one of ``parameters``, by its ``id``."""
        chunks = [(self._module_digest(chunk), chunk) for chunk in self._chunks.values()]
        inside = {id(module) for _, chunk in chunks for module in chunk.modules()}
        found: dict[int, set[str]] = {}

        def note(module: nn.Module, digest: str) -> None:
            for parameter in {id(p) for p in module.parameters()} & parameters:
                found.setdefault(parameter, set()).add(digest)

        def note_other_holder(module: nn.Module) -> None:
            if id(module) not in inside and not parameters.isdisjoint(map(id, module.parameters())):
                digest = self._module_digest(module)
                wrapped = {id(chunk) for own, chunk in chunks if own == digest}
                if wrapped.isdisjoint(map(id, module.modules())):
                    note(module, digest)

        for module in _modules_alive():
            with suppress(Exception):  # a foreign module may be half built, or raise when it is inspected
                note_other_holder(module)
        for digest, chunk in chunks:
            if _is_listed_twice(chunk):
                note(chunk, digest)
        return found


def _modules_alive() -> Iterator[nn.Module]:
    for value in gc.get_objects():
        if issubclass(type(value), nn.Module) and "_modules" in vars(value):
            yield value


def _is_listed_twice(module: nn.Module) -> bool:
    """Whether a list, tuple or dict, such as the list of a model's chunks, has ``module`` twice."""
    for holder in gc.get_referrers(module):
        values: Iterable[Any] = holder.values() if type(holder) is dict else holder
        if type(holder) in (list, tuple, dict) and sum(value is module for value in list(values)) > 1:
            return True
    return False


@torch.no_grad()
def content_digest(tensor: torch.Tensor) -> str | None:
    """Return a digest of the first elements of the first rows, which are in the first rank's shard, too.

    None for a tensor without memory, and for values that identify nothing: constants, and rows that repeat.
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
    return short_hash(f"{tensor.dtype} {list(tensor.shape)}".encode() + data)


@torch.no_grad()
def _looks_random(tensor: torch.Tensor) -> bool:
    """Whether values look random, unlike ``eye``, ``arange``, or anything monotonic along a dimension."""
    part = next(iter(components(tensor)), torch.empty(0))
    part = (torch.view_as_real(part).flatten(-2) if part.is_complex() else part).squeeze()
    values = (
        (part.flatten(1) if part.dim() > 1 else part.reshape(1, -1))[:_MOST_SEEN, : _MOST_SEEN * _MOST_SEEN]
        .double()
        .cpu()
    )
    if values.numel() < _LEAST or torch.unique(values).numel() * 4 < values.numel():
        return False
    for dim in (0, 1):
        steps = values.diff(dim=dim)
        count = steps.shape[dim]
        if count >= _LEAST - 1:
            turns = steps.narrow(dim, 1, count - 1) * steps.narrow(dim, 0, count - 1) < 0
            if turns.double().mean() < _LEAST_TURNS:
                return False
    return True


def short_hash(data: bytes) -> str:
    """16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
