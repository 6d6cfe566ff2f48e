"""Compares the initial weights of ranks that hold the same layers, or broadcasts them from the first rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ldt.errors import LdtError
from ldt.runtime.common.peer_messages import as_str_dict, plain
from ldt.runtime.control.collectives import wait_or_fail
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.digests import components, digests, raw_bytes
from ldt.runtime.model.module_state import (
    HeldTensor,
    repeats_elements,
    sharded_over,
    tensors_held,
    unwrapped_tensors,
)

__all__ = ["Weights", "broadcast", "check_writable"]

_BUCKET_BYTES = 32 << 20
_MOST_COMPARED = 8  # ranks that an error names


class Weights:
    """The parameters and buffers of this rank's ``modules``, given by label, to be compared with other ranks'.

    Gather ``digests`` from all ranks, then call ``compare``. The ranks of a stage, in all its replicas, hold equal
    tensors, except those split over them: shards of DTensors, and parts of tensor-parallel layers
    (``tensor_model_parallel``). With ``values`` the values must be equal, otherwise only names, shapes, dtypes and
    ``requires_grad``. Raises LdtError for a tensor that has no values to compare, or that a broadcast cannot write.
    """

    def __init__(self, mesh: Mesh, modules: Mapping[str, nn.Module], values: bool) -> None:
        self._mesh = mesh
        self._by_shard: dict[str, list[HeldTensor]] = {}
        self._count = len(mesh.topology.ranks_of_stage(mesh.stage))
        for held in () if self._count == 1 else tensors_held(modules):
            self._by_shard.setdefault(_shard_key(held.tensor, mesh), []).append(held)
            if values and (is_lazy(held.tensor) or held.tensor.is_meta):
                raise LdtError(
                    f"{held.label} has no values yet, and the {self._count} ranks that hold it must begin with equal "
                    "values: initialize it before Pipeline(), as a lazy module's first forward does, or pass "
                    "check_weights=False and load the same values on all ranks"
                )
            if not values:
                check_writable(held.label, held.tensor, "sync_weights=True")
        self._tensor_lines = {part: _tensor_lines(found, values) for part, found in self._by_shard.items()}

    def digests(self) -> dict[str, str]:
        """Return one digest per shard of the stage that this rank holds."""
        return {part: _digest(lines) for part, lines in self._tensor_lines.items()}

    def compare(self, gathered: Sequence[Mapping[str, str]]) -> None:
        """Raise LdtError on every rank if two ranks differ, naming tensor and ranks.

        ``gathered`` has the ``digests`` of every rank.
        """
        differing = next(_differing(self._mesh, gathered), None)
        if differing is None:
            return
        part, ranks = differing
        local = self._tensor_lines.get(part, {}) if self._mesh.rank in ranks else {}
        with self._mesh.collective("Pipeline()"):
            found: list[dict[str, str]] = self._mesh.control.all_gather(local, as_str_dict)
        raise LdtError(_error_text(self._mesh, ranks, [found[rank] for rank in ranks]))

    def broadcast_from_first(self) -> None:
        """Broadcast each tensor from the first rank of the stage that holds it. A collective call of all ranks."""
        mesh = self._mesh
        with mesh.collective("Pipeline()"):
            for group, dim in ((_node_group(mesh), 0), (mesh.dp_group, 1)):
                tensors = {
                    id(held.tensor): held.tensor
                    for found in self._by_shard.values()
                    for held in found
                    if not sharded_over(held.tensor, mesh.rank_info)[dim]
                }
                broadcast(list(tensors.values()), group, mesh, "the weights of the first rank of the stage")


@torch.no_grad()
def broadcast(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None, mesh: Mesh, what: str
) -> None:
    """Broadcast ``tensors``, of any dtypes, from the first rank of ``group``; texts call them ``what``."""
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


def check_writable(label: str, tensor: torch.Tensor, option: str) -> None:
    """Raise LdtError if ``broadcast`` cannot write ``tensor``; ``option`` is the argument that asks for it."""
    kind = next(filter(None, map(_unwritable, unwrapped_tensors(tensor.detach()))), "")
    if kind:
        raise LdtError(
            f"{label} is {kind}, which cannot be written by a broadcast: make it a tensor with plain memory "
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
        return "a tensor whose elements share memory, as from expand()"
    return "an inference tensor" if tensor.is_inference() else ""


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


def _shard_key(tensor: torch.Tensor, mesh: Mesh) -> str:
    """Name the shard of ``tensor`` that this rank holds: ranks with the same key hold the same shard."""
    over_node, over_replicas = sharded_over(tensor, mesh.rank_info)
    return f"{mesh.tp_rank if over_node else ''}/{mesh.replica if over_replicas else ''}"


def _tensor_lines(found: Sequence[HeldTensor], values: bool) -> dict[str, str]:
    """Return by label a line with all that must be equal: dtype, shape, placements and a digest of the values."""
    contents = digests([held.tensor for held in found]) if values else [""] * len(found)
    return {held.label: f"{held.describe()} {content}" for held, content in zip(found, contents, strict=True)}


def _digest(lines: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(sorted(lines.items())).encode(), digest_size=16).hexdigest()


def _differing(mesh: Mesh, gathered: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, list[int]]]:
    """Yield each shard on which ranks differ, with the first rank that holds it and the ranks that differ from it."""
    for stage in range(mesh.topology.num_stages):
        ranks = mesh.topology.ranks_of_stage(stage)
        for part in sorted({part for rank in ranks for part in gathered[rank]}):
            holders = [rank for rank in ranks if part in gathered[rank]]
            others = [rank for rank in holders if gathered[rank][part] != gathered[holders[0]][part]]
            if others:
                yield part, [holders[0], *others][:_MOST_COMPARED]


def _error_text(mesh: Mesh, ranks: Sequence[int], found: Sequence[Mapping[str, str]]) -> str:
    first = found[0]
    labels = dict.fromkeys(label for lines in found for label in lines)
    label = next(label for label in labels if any(lines.get(label) != first.get(label) for lines in found))
    others = [rank for rank, lines in zip(ranks, found, strict=True) if lines.get(label) != first.get(label)]
    other = found[ranks.index(others[0])]
    shown, shown_other = (_without_values(lines.get(label)) for lines in (first, other))
    kinds = "its values differ" if shown == shown_other else f"{shown} and {shown_other}"
    who, whose = mesh.ranks[ranks[0]], [mesh.ranks[rank] for rank in others]
    return (
        f"{plain(label)} differs between rank {who} and ranks {whose} of stage {mesh.topology.node_of(ranks[0]).stage}"
        f", which train one model and must begin equal: {plain(kinds)}. Build the chunks of all ranks from one seed, "
        f"or pass Pipeline(sync_weights=True) to broadcast the values of rank {who}. Pass check_weights=False if the "
        "weights are loaded later. Mark tensors split over a stage's ranks (a DTensor, or tensor_model_parallel)"
    )


def _without_values(line: str | None) -> str:
    return "no tensor of this name" if line is None else line.rpartition(" ")[0]
