"""Whether ranks that hold the same weights begin with equal ones; or those of the first of them, sent to the others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ldt.errors import LdtError
from ldt.runtime.common.untrusted import as_str_dict, plain
from ldt.runtime.control.collectives import wait_or_fail
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.digests import components, digests, raw_bytes
from ldt.runtime.model.module_state import (
    HeldTensor,
    repeats_elements,
    spread,
    tensors_held,
    unwrapped_tensors,
)

__all__ = ["Weights", "broadcast", "refuse_unwritable"]

_BUCKET_BYTES = 32 << 20
_ASKED = 8  # ranks whose tensors are compared one by one


class Weights:
    """What this rank's ``modules``, by where they are, hold: ``tell`` it to all ranks, then ``compare`` theirs.

    The ranks of a stage, of all its replicas, hold the same but for what is split over them: shards of DTensors, and
    parts of tensor-parallel layers (``tensor_model_parallel``). With ``values`` these must be equal, else only names,
    shapes, dtypes and what requires a gradient. LdtError for what has no values to compare, or cannot be written by
    ``send``.
    """

    def __init__(self, mesh: Mesh, modules: Mapping[str, nn.Module], values: bool) -> None:
        self._mesh = mesh
        self._by_part: dict[str, list[HeldTensor]] = {}
        self._count = len(mesh.topology.ranks_of_stage(mesh.stage))
        for held in () if self._count == 1 else tensors_held(modules):
            self._by_part.setdefault(_part(held.tensor, mesh), []).append(held)
            if values and (is_lazy(held.tensor) or held.tensor.is_meta):
                raise LdtError(
                    f"{held.label} has no values yet, and the {self._count} ranks that hold it must begin with equal "
                    "ones: give it values before Pipeline(), as a lazy module's first forward does, or "
                    "check_weights=False and load the same into all"
                )
            if not values:
                refuse_unwritable(held.label, held.tensor, "sync_weights=True")
        self._lines = {part: _lines(found, values) for part, found in self._by_part.items()}

    def tell(self) -> dict[str, str]:
        """One digest for each part of the stage that this rank has."""
        return {part: _digest(lines) for part, lines in self._lines.items()}

    def compare(self, told: Sequence[Mapping[str, str]]) -> None:
        """Raise LdtError on every rank, naming tensor and ranks, if two differ; ``told`` is what each rank told."""
        differing = next(_differing(self._mesh, told), None)
        if differing is None:
            return
        part, ranks = differing
        mine = self._lines.get(part, {}) if self._mesh.rank in ranks else {}
        with self._mesh.collective("Pipeline()"):
            found: list[dict[str, str]] = self._mesh.control.all_gather(mine, as_str_dict)
        raise LdtError(_sentence(self._mesh, ranks, [found[rank] for rank in ranks]))

    def send(self) -> None:
        """Every rank takes the values of the first of its stage that holds the same. A collective call of all."""
        mesh = self._mesh
        with mesh.collective("Pipeline()"):
            for group, dim in ((_node_group(mesh), 0), (mesh.dp_group, 1)):
                tensors = {
                    id(held.tensor): held.tensor
                    for found in self._by_part.values()
                    for held in found
                    if not spread(held.tensor, mesh.rank_info)[dim]
                }
                broadcast(list(tensors.values()), group, mesh, "the weights of the first rank of the stage")


@torch.no_grad()
def broadcast(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None, mesh: Mesh, what: str
) -> None:
    """Write what the first rank of ``group`` has of ``tensors`` to those of its others, whatever their dtypes."""
    if group is None:
        return
    for bucket in _buckets([part for tensor in tensors for part in components(tensor)]):
        flat = torch.cat([raw_bytes(part).to(mesh.device) for part in bucket])
        work = dist.broadcast(flat, group=group, group_src=0, async_op=True)
        if flat.device.type == "cpu":
            wait_or_fail(work, mesh.detector, what)
        else:
            work.wait()
        if dist.get_rank(group) != 0:
            for part, raw in zip(bucket, torch.split(flat, [part.nbytes for part in bucket]), strict=True):
                part.copy_(raw.clone().view(part.dtype).view(part.shape))


def refuse_unwritable(label: str, tensor: torch.Tensor, option: str) -> None:
    """Raise LdtError, naming it, for a tensor that ``broadcast``, which ``option`` asks for, cannot write as it is."""
    kind = next(filter(None, map(_unwritable, unwrapped_tensors(tensor.detach()))), "")
    if kind:
        raise LdtError(
            f"{label} is {kind}, whose values cannot be taken from another rank: make it a tensor with plain memory "
            f"before Pipeline(), or leave out {option}"
        )


def _unwritable(tensor: torch.Tensor) -> str:
    if is_lazy(tensor) or tensor.is_meta:
        return "a tensor without values"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"a {'nested' if tensor.is_nested else tensor.layout} tensor"
    if repeats_elements(tensor):
        return "a tensor whose elements share memory, as of expand()"
    return "a tensor of inference mode" if tensor.is_inference() else ""


def _buckets(parts: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for part in parts:
        if bucket and sum(other.nbytes for other in bucket) + part.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(part)
    if bucket:
        yield bucket


def _node_group(mesh: Mesh) -> dist.ProcessGroup | None:
    return mesh.tp_mesh.get_group() if mesh.topology.tp[mesh.stage] > 1 else None


def _part(tensor: torch.Tensor, mesh: Mesh) -> str:
    """What this rank holds of a tensor of its stage: ranks with the same text hold the same."""
    over_node, over_replicas = spread(tensor, mesh.rank_info)
    return f"{mesh.tp_rank if over_node else ''}/{mesh.replica if over_replicas else ''}"


def _lines(found: Sequence[HeldTensor], values: bool) -> dict[str, str]:
    """By tensor what must be equal of it."""
    contents = digests([held.tensor for held in found]) if values else [""] * len(found)
    return {held.label: f"{held.describe()} {content}" for held, content in zip(found, contents, strict=True)}


def _digest(lines: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(sorted(lines.items())).encode(), digest_size=16).hexdigest()


def _differing(mesh: Mesh, told: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, list[int]]]:
    """Parts of which ranks differ: the first rank that has it, and those that have another."""
    for stage in range(mesh.topology.num_stages):
        ranks = mesh.topology.ranks_of_stage(stage)
        for part in sorted({part for rank in ranks for part in told[rank]}):
            holders = [rank for rank in ranks if part in told[rank]]
            others = [rank for rank in holders if told[rank][part] != told[holders[0]][part]]
            if others:
                yield part, [holders[0], *others][:_ASKED]


def _sentence(mesh: Mesh, ranks: Sequence[int], found: Sequence[Mapping[str, str]]) -> str:
    first = found[0]
    labels = dict.fromkeys(label for lines in found for label in lines)
    label = next(label for label in labels if any(lines.get(label) != first.get(label) for lines in found))
    others = [rank for rank, lines in zip(ranks, found, strict=True) if lines.get(label) != first.get(label)]
    other = found[ranks.index(others[0])]
    mine, theirs = (_without_values(lines.get(label)) for lines in (first, other))
    kinds = "its values are others" if mine == theirs else f"{mine} and {theirs}"
    who, whose = mesh.ranks[ranks[0]], [mesh.ranks[rank] for rank in others]
    return (
        f"{plain(label)} differs between rank {who} and ranks {whose} of stage {mesh.topology.node_of(ranks[0]).stage}"
        f", which train one model and must begin equal: {plain(kinds)}. Build the chunks of all ranks from one seed, "
        f"or give Pipeline(sync_weights=True), which takes the values of rank {who}; give check_weights=False where "
        "weights are loaded later, and mark what is split over a stage's ranks (a DTensor, or tensor_model_parallel)"
    )


def _without_values(line: str | None) -> str:
    return "nothing of this name" if line is None else line.rpartition(" ")[0]
