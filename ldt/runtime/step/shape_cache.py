"""Caches the specs of every hop: inferred once by a chunk's ranks, then equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ldt.errors import LdtError
from ldt.runtime.common.lru import LruCache
from ldt.runtime.common.redact import QuotingError
from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec, describe
from ldt.runtime.control.collectives import as_bytes
from ldt.runtime.dry_run.forward_hooks import ForwardHooks
from ldt.runtime.dry_run.grad_flow import InferredOutputs, Reach, used
from ldt.runtime.dry_run.shape_inference import infer, infer_reach, warm_up
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.keywords import declares, keywords_of
from ldt.runtime.step.metadata import METADATA_NAMES, StepMessage
from ldt.runtime.step.microbatch import Microbatch

__all__ = ["ShapeCache"]

CACHE_SIZE = 4096  # entries for the head, and as many for the other chunks


class _Query(NamedTuple):
    """Asks what ``chunk`` returns for ``inputs``. Equal queries have equal results on every rank."""

    chunk: int
    inputs: HopSpecs
    metadata: Hashable  # shapes and values of its keyword arguments, with the number of its signature
    training: bool
    setting: str


class ShapeCache:
    """The specs of hops c -> c+1 for every microbatch of a step, equal on all ranks.

    The step message has the specs of hop 0 and the edge's setting. For a query that is not cached, a chunk's leader
    infers the outputs, and which inputs get a gradient, and broadcasts them for all microbatches at once. Results are
    kept until ``forget``: the most recent 4096 of the head, and of the other chunks. Hops within a node have no specs.

    Args:
        mesh: The mesh of the pipeline.
        chunks: This rank's modules, by chunk.
        reads: By chunk, for chunks of all nodes, the metadata whose values its output specs may depend on.
        number: The number of the pipeline in the mesh.
        loss_trains: Whether the loss has trained weights.
    """

    def __init__(
        self,
        mesh: Mesh,
        chunks: Mapping[int, nn.Module],
        reads: Mapping[str, Sequence[str]] | None = None,
        number: int = 0,
        loss_trains: bool = False,
    ) -> None:
        self.chunks = chunks
        self._loss_trains = loss_trains
        self.hooks = ForwardHooks(mesh.watchdog.store, f"{mesh.watchdog.key}/pipeline-{number}")
        self._reads = {int(chunk): names for chunk, names in (reads or {}).items()}
        self._mesh = mesh
        self._topology = mesh.topology
        self.keywords = {index: keywords_of(module) for index, module in chunks.items()}
        if mesh.topology.channels:
            warm_up()
        self._heads: LruCache[HopSpecs] = LruCache(CACHE_SIZE)
        self._outputs: LruCache[InferredOutputs] = LruCache(CACHE_SIZE)

    @property
    def reads_values(self) -> bool:
        """Whether ``hops`` reads elements of metadata, not only their shapes."""
        return any(self._reads.values())

    def autocast(self) -> str | None:
        """Return the autocast dtype on this rank's device, None if autocast is off."""
        kind = self._mesh.device.type
        return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None

    def setting(self) -> str:
        """Describe the modes that may change shapes for equal inputs: autocast, and which modules are in train mode.

        A compression is named, too.

        The edge's setting stands for all ranks: modes must change between the same two steps on every rank.
        """
        modes = bytes(part.training for chunk in self.chunks.values() for part in chunk.modules())
        compression = self._mesh.compressions.to_text()
        packed = "" if compression == "none" else f" compression={compression}"
        return f"autocast={self.autocast()} modes={hashlib.sha256(modes).hexdigest()[:16]}{packed}"

    def forget(self) -> None:
        """Clear the cache. Call it on all ranks between the same two steps."""
        self._heads.clear()
        self._outputs.clear()

    def head_output(self, microbatch: Microbatch, training: bool, setting: str) -> HopSpecs:
        """Return the specs of hop 0 for a microbatch. Local, on the edge only."""
        if not self._topology.crosses(0):
            return ()
        key = (microbatch.signature, self._metadata_key(0, microbatch.kwargs), training, setting)
        return self._heads.get(
            key, lambda: self._infer(0, microbatch.args, microbatch.kwargs, training).specs
        )

    def hops(
        self, message: StepMessage, replica: int, training: bool, samples: Sequence[Mapping[str, Any]]
    ) -> list[list[HopSpecs]]:
        """Return the specs of each hop for each microbatch in the ``message`` of edge ``replica``.

        ``samples`` are the keyword inputs of the microbatches, on that replica. A collective call of all ranks.
        """
        if not self._topology.channels:
            return [[()] * self._topology.tail for _ in message.microbatches]
        hops = [list(microbatch.hops[:1]) for microbatch in message.microbatches]
        answers: list[list[InferredOutputs]] = [[] for _ in hops]
        for chunk in range(1, self._topology.num_chunks if training else self._topology.tail):
            # The edge may have inputs that are no metadata: the number of their signature stands for them.
            local = self._topology.stage_of(chunk) == 0
            numbered = local and chunk < self._topology.tail
            given = [
                (self._metadata_key(chunk, m.tensors), m.id if numbered else None)
                for m in message.microbatches
            ]
            queries = [
                _Query(chunk, carried[-1], names, training, message.setting)
                for carried, names in zip(hops, given, strict=True)
            ]
            offered = samples if local else [microbatch.tensors for microbatch in message.microbatches]
            found = self._query_ranks(queries, replica, offered)
            for carried, known, query in zip(hops, answers, queries, strict=True):
                known.append(found[query])
                if chunk < self._topology.tail:
                    carried.append(found[query].specs)
        for hop in range(self._topology.tail):
            for specs in {carried[hop] for carried in hops}:
                self._check_sharded_hop(hop, specs, replica)
        return [_with_usage(*pair) for pair in zip(hops, answers, strict=True)] if training else hops

    def _query_ranks(
        self, queries: Sequence[_Query], replica: int, offered: Sequence[Mapping[str, Any]]
    ) -> dict[_Query, InferredOutputs]:
        """Answer the queries. For new ones the chunk's ranks infer the outputs, and one leader broadcasts its result.

        All replicas of a cloud stage compare it with their own; on the edge only the replica with these microbatches.
        """
        known = {query: self._outputs.find(query) for query in queries}
        new = {query: queries.index(query) for query, answer in known.items() if answer is None}
        if new:
            node = self._topology.node_at(queries[0].chunk, replica)
            local = None
            if node == self._mesh.node or (node.stage == self._mesh.stage and not self._mesh.is_edge):
                local = [self._infer(q.chunk, q.inputs, offered[at], q.training) for q, at in new.items()]
            message = None if local is None else [answer.to_json() for answer in local]
            agreed = self._mesh.control.broadcast(message, node, partial(_parse_outputs, list(new)))
            self._compare(queries[0].chunk, agreed, local)
            for query, answer in zip(new, agreed, strict=True):
                known[query] = self._outputs.get(query, lambda answer=answer: answer)  # type: ignore[misc]
        return known  # type: ignore[return-value]

    def _compare(
        self, chunk: int, agreed: Sequence[InferredOutputs], local: Sequence[InferredOutputs] | None
    ) -> None:
        for (leaders, *_), (own, *_) in zip(agreed, local or agreed, strict=True):
            if own != leaders:
                layouts = ", in another memory layout" if describe(own) == describe(leaders) else ""
                raise LdtError(
                    f"the ranks of stage {self._mesh.stage} disagree on what chunk {chunk} returns: its leader says "
                    f"{describe(leaders)}, rank {self._mesh.ranks[self._mesh.rank]} says {describe(own)}{layouts}; "
                    "they must hold equal modules, and what random numbers or a state decide needs an output_spec"
                )

    def _check_sharded_hop(self, hop: int, specs: HopSpecs, replica: int) -> None:
        """Raise LdtError if tensors are sharded over ranks and their link cannot carry shards."""
        split = [spec for spec in specs if spec.shard is not None]
        if split and not self._mesh.transfers.can_split(self._topology.channel(hop, "F", replica)):
            raise LdtError(
                f"chunk {hop} returns {describe(split)}, whose shards this link cannot carry: connect with "
                'transfer="direct" or "auto", for all links or for this one, or return full_tensor() from the chunk'
            )

    def _metadata_key(self, chunk: int, tensors: Mapping[str, Any]) -> Hashable:
        """Return what the output specs may depend on: all shapes, and the values that its ``output_spec`` reads."""
        metadata = {
            name: tensors[name] for name in METADATA_NAMES if isinstance(tensors.get(name), torch.Tensor)
        }
        reads = self._reads.get(chunk, ())
        return tuple(
            (name, TensorSpec.of(tensor), _digest(tensor) if name in reads else b"")
            for name, tensor in metadata.items()
        )

    def _infer(
        self, chunk: int, args: Sequence[Any], offered: Mapping[str, Any], training: bool
    ) -> InferredOutputs:
        """Infer the outputs of ``chunk`` for tensors or specs; for the last chunk only the reach of the loss."""
        mesh, module = self._mesh, self.chunks[chunk]
        kwargs = self.keywords_for(chunk, offered, len(args))
        if chunk == self._topology.tail:
            return infer_reach(module, args, kwargs, mesh.device, mesh.shards, self._loss_trains)
        try:
            answer = infer(chunk, module, args, kwargs, mesh.device, training, mesh.shards)
            if not training and mesh.compressions.by_link:  # which tensors are packed
                step = infer(chunk, module, args, kwargs, mesh.device, True, mesh.shards)
                answer = answer.with_grads_of(step)
        except QuotingError as error:
            raise error.and_also(self.hooks.advice(chunk, module)) from error.__cause__
        self.hooks.publish(chunk, module)
        return answer

    def keywords_for(self, chunk: int, offered: Mapping[str, Any], num_positional: int) -> dict[str, Any]:
        """Return those of ``offered`` that ``chunk`` accepts by name after ``num_positional`` tensors of a hop."""
        kwargs = self.keywords[chunk].pick(offered, num_positional)
        if self._mesh.is_edge or declares(self.chunks[chunk]):
            return kwargs
        # Metadata are on the CPU here, but will be on the device.
        return {name: TensorSpec.of(tensor) for name, tensor in kwargs.items()}


def _with_usage(hops: Sequence[HopSpecs], answers: Sequence[InferredOutputs]) -> list[HopSpecs]:
    """Return the hops of a microbatch with the use of their tensors, propagated from the loss to the first chunk."""
    found: list[HopSpecs] = []
    outputs: list[bool | None] = [True]  # the loss
    decisive: list[int] = []
    for inputs, answer in zip(reversed(hops[: len(answers)]), reversed(answers), strict=True):
        found.append(used(inputs, outputs, answer, decisive))
        outputs = [spec.used if spec.requires_grad else False for spec in found[-1]]
        decisive = [i for i, spec in enumerate(found[-1]) if spec.decisive]
    return [*reversed(found), *hops[len(answers) :]]


def _parse_outputs(queries: Sequence[_Query], value: Any) -> list[InferredOutputs]:
    """Parse the results of another rank. Raises ValueError if they do not answer the queries."""
    answers = [
        InferredOutputs(tuple(map(TensorSpec.from_json, specs)), _reaches(value), tuple(map(int, reentrant)))
        for specs, value, reentrant in value
    ]
    if len(answers) != len(queries):
        raise ValueError(f"expected the specs of {len(queries)} microbatches, got {len(answers)}")
    for query, answer in zip(queries, answers, strict=True):
        numbers = {*answer.reentrant, *(i for reach in answer.reaches for numbers in reach for i in numbers)}
        outputs = len(answer.specs) or len(answer.reaches)  # the last chunk has no specs
        if not numbers <= set(range(len(query.inputs))) or len(answer.reaches) != query.training * outputs:
            raise ValueError(
                "expected the numbers of the inputs that each output reaches, got invalid numbers"
            )
    return answers


def _reaches(value: Any) -> tuple[Reach, ...]:
    return tuple(Reach(*(tuple(map(int, numbers)) for numbers in reach)) for reach in value)


def _digest(tensor: torch.Tensor) -> bytes:
    """Return a digest of the elements. Waits for the device."""
    return hashlib.sha256(as_bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))).digest()
