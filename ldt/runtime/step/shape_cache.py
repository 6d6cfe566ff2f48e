"""Caches the specs of every hop: inferred once by a chunk's ranks, then equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ldt.errors import LdtError
from ldt.runtime.common.device import autocast_dtype
from ldt.runtime.common.kept import check_taken, sent_specs
from ldt.runtime.common.lru import LruCache
from ldt.runtime.common.output_marks import num_positional
from ldt.runtime.common.redact import QuotingError
from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec, describe
from ldt.runtime.control.collectives import as_bytes
from ldt.runtime.dry_run.forward_hooks import ForwardHooks
from ldt.runtime.dry_run.grad_flow import InferredOutputs
from ldt.runtime.dry_run.isolation import unseen
from ldt.runtime.dry_run.shape_inference import infer, infer_reach, warm_up
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.keywords import declares, keywords_of
from ldt.runtime.step.audit import Audit
from ldt.runtime.step.call import Call
from ldt.runtime.step.metadata import METADATA_NAMES, StepMessage
from ldt.runtime.step.microbatch import Microbatch
from ldt.runtime.step.shape_exchange import Place, ShapeExchange
from ldt.runtime.step.shape_walk import Query, ShapeWalk

__all__ = ["ShapeCache"]

CACHE_SIZE = 4096  # entries for the head, and as many for the other chunks


class ShapeCache:
    """The specs of hops c -> c+1 for every microbatch of a step, equal on all ranks.

    The step message has the specs of hop 0 and the edge's setting. For queries that are not cached, the chunks' ranks
    infer the outputs, and which inputs get a gradient, in one exchange. Results are kept until ``forget``: the most
    recent 4096 of the head, and of the other chunks. Hops within a node have no specs.

    Args:
        mesh: The mesh of the pipeline.
        chunks: This rank's modules, by chunk.
        reads: By chunk, for chunks of all nodes, the metadata whose values its output specs may depend on.
        number: The number of the pipeline in the mesh.
        loss_trains: Whether the loss has trained weights.
        audit: Gets a line about what the edge sends.
    """

    def __init__(
        self,
        mesh: Mesh,
        chunks: Mapping[int, nn.Module],
        reads: Mapping[str, Sequence[str]] | None = None,
        number: int = 0,
        loss_trains: bool = False,
        audit: Audit | None = None,
    ) -> None:
        self.chunks = chunks
        self._loss_trains = loss_trains
        self._audit = audit
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
        """Return the name of the autocast dtype on this rank's device, None if autocast is off."""
        return autocast_dtype(self._mesh.device)

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
        if not self._topology.channels:
            return ()
        if getattr(self.chunks[0], "head_spec", None) is not None:
            return self._head_spec(microbatch, training)
        key = (microbatch.signature, self._metadata_key(0, microbatch.kwargs), training, setting)
        return self._heads.get(
            key, lambda: self._infer(0, microbatch.args, microbatch.kwargs, training).specs
        )

    def _head_spec(self, microbatch: Microbatch, training: bool) -> HopSpecs:
        """What the first chunk declares by the values of its inputs: never from the cache."""
        chunk: Any = self.chunks[0]
        with torch.set_grad_enabled(training), unseen(self._mesh.device):
            specs: HopSpecs = chunk.head_spec(*microbatch.args, **microbatch.kwargs)
        return specs if training else tuple(spec.without_grad() for spec in specs)

    def hops(
        self, messages: Sequence[StepMessage], call: Call, samples: Sequence[Mapping[str, Any]]
    ) -> list[list[list[HopSpecs]]]:
        """Return the specs of each hop for each microbatch in each of the ``messages`` of the edge's replicas.

        ``samples`` are the keyword inputs of this rank's microbatches, on the edge. A collective call of all ranks.
        """
        if not self._topology.channels:
            return [[[()] * self._topology.tail for _ in message.microbatches] for message in messages]

        def infer(query: Query, place: Place) -> InferredOutputs:
            replica, index = place
            offered = samples[index] if self._mesh.is_edge else messages[replica].microbatches[index].tensors
            return self._infer(query.chunk, query.inputs, offered, query.training)

        walks = [
            ShapeWalk(self._topology, message, call.training, self._metadata_key) for message in messages
        ]
        found = ShapeExchange(self._mesh, call, self._audit, walks, self._outputs.peek, infer).run()
        for query, answer in found.items():  # in one order on all ranks, so that all keep the same
            self._outputs.get(query, lambda answer=answer: answer)  # type: ignore[misc]
        by_edge = [walk.hops() for walk in walks]
        for replica, hops in enumerate(by_edge):
            for hop in range(self._topology.tail):
                for specs in {carried[hop] for carried in hops}:
                    self._check_sharded_hop(hop, specs, replica)
        return by_edge

    def _check_sharded_hop(self, hop: int, specs: HopSpecs, replica: int) -> None:
        """Raise LdtError if tensors are sharded over ranks and their link cannot carry shards."""
        split = [spec for spec in sent_specs(specs) if spec.shard is not None]
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
        kwargs = self.keywords_for(chunk, offered, num_positional(args))
        if chunk == self._topology.tail:
            return infer_reach(module, args, kwargs, mesh.device, mesh.shards, self._loss_trains)
        try:
            answer = infer(chunk, module, args, kwargs, mesh.device, training, mesh.shards)
            if not training and mesh.compressions.by_link:  # which tensors are packed
                step = infer(chunk, module, args, kwargs, mesh.device, True, mesh.shards)
                answer = answer.with_grads_of(step)
        except QuotingError as error:
            raise error.and_also(self.hooks.advice(chunk, module)) from error.__cause__
        if any(spec.kept for spec in answer.specs):
            check_taken(self._topology, chunk)
        self.hooks.publish(chunk, module)
        return answer

    def keywords_for(self, chunk: int, offered: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return those of ``offered`` that ``chunk`` accepts by name after a ``number`` of positional arguments."""
        kwargs = self.keywords[chunk].pick(offered, number)
        if self._mesh.is_edge or declares(self.chunks[chunk]):
            return kwargs
        # Metadata are on the CPU here, but will be on the device.
        return {name: TensorSpec.of(tensor) for name, tensor in kwargs.items()}


def _digest(tensor: torch.Tensor) -> bytes:
    """Return a digest of the elements. Waits for the device."""
    return hashlib.sha256(as_bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))).digest()
