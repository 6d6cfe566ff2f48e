"""Follows what microbatches carry from chunk to chunk."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ldt.runtime.common.auxiliary_loss import carried_names, losses_spec
from ldt.runtime.common.kept import earlier_chunk, input_specs, kept_specs, mark_kept, sent_specs
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.dry_run.grad_flow import InferredOutputs, used
from ldt.runtime.step.metadata import StepMessage
from ldt.topology import Topology

__all__ = ["Query", "ShapeWalk", "inputs_of"]

MetadataKey = Callable[[int, Mapping[str, Any]], Hashable]


class Query(NamedTuple):
    """Asks what ``chunk`` returns for ``inputs``. Equal queries have equal results on every rank."""

    chunk: int
    inputs: HopSpecs
    metadata: Hashable  # shapes and values of its keyword arguments, with the number of its signature
    training: bool
    setting: str


class ShapeWalk:
    """The specs of hops for the microbatches in the ``message`` of an edge replica, as far as they are known.

    ``metadata_key`` tells what the output specs of a chunk may depend on. ``chunk`` is the next one, and ``queries``
    are what is asked of it, for each microbatch. An eval asks nothing of the last chunk.
    """

    def __init__(
        self, topology: Topology, message: StepMessage, training: bool, metadata_key: MetadataKey
    ) -> None:
        self._topology = topology
        self._metadata_key = metadata_key
        self._training = training
        self._answers: list[list[InferredOutputs]] = [[] for _ in message.microbatches]
        self._hops = [[_head_outputs(*microbatch.hops[:2])] for microbatch in message.microbatches]
        self._losses: list[list[HopSpecs]] = [[()] for _ in message.microbatches]  # by hop
        self.message = message
        self.chunk = 1
        self.queries = self._ask()

    def advance(self, answers: Sequence[InferredOutputs]) -> None:
        """Go on behind the next chunk, with an answer to each of the ``queries``."""
        ends = self._topology.stage_of(self.chunk) == 0  # auxiliary losses end on the edge
        for carried, of_hops, known, answer in zip(
            self._hops, self._losses, self._answers, answers, strict=False
        ):
            known.append(answer)
            if self.chunk < self._topology.tail:
                carried.append(answer.specs)
                names = dict.fromkeys((*carried_names(of_hops[-1]), *answer.losses))
                of_hops.append(() if ends else losses_spec(tuple(names), self._training))
        self.chunk += 1
        self.queries = self._ask()

    def hops(self) -> list[list[HopSpecs]]:
        """Return the specs of each hop for each microbatch, in training with the use of their tensors."""
        found = self._hops
        if self._training:
            pairs = zip(self._hops, self._answers, strict=True)
            found = [_with_usage(self._topology, *pair) for pair in pairs]
        return [
            [
                (*sent_specs(specs), *carried, *kept_specs(specs))
                for specs, carried in zip(hops, of_hops, strict=True)
            ]
            for hops, of_hops in zip(found, self._losses, strict=True)
        ]

    def _ask(self) -> list[Query]:
        tail = self._topology.tail
        if self.chunk > tail or (self.chunk == tail and not self._training):
            return []
        # The edge may have inputs that are no metadata: the number of their signature stands for them.
        numbered = self._topology.stage_of(self.chunk) == 0 and self.chunk < tail
        return [
            Query(
                self.chunk,
                inputs_of(self._topology, carried, self.chunk),
                (self._metadata_key(self.chunk, microbatch.tensors), microbatch.id if numbered else None),
                self._training,
                self.message.setting,
            )
            for carried, microbatch in zip(self._hops, self.message.microbatches, strict=True)
        ]


def inputs_of(topology: Topology, hops: Sequence[HopSpecs], chunk: int) -> HopSpecs:
    """Return the inputs of ``chunk`` for a microbatch with the outputs ``hops`` of the chunks before it."""
    inputs = input_specs(topology, hops.__getitem__, chunk)
    return tuple(replace(spec, kept=False) if spec.kept else spec for spec in inputs)


def _head_outputs(sent: HopSpecs = (), kept: HopSpecs = ()) -> HopSpecs:
    """Return the outputs of the first chunk, which the step message has in two parts."""
    return mark_kept((*sent, *kept), len(kept))


def _with_usage(
    topology: Topology, hops: Sequence[HopSpecs], answers: Sequence[InferredOutputs]
) -> list[HopSpecs]:
    """Return the hops of a microbatch with the use of their tensors, propagated from the loss to the first chunk."""
    found = [list(specs) for specs in hops]
    outputs: list[bool | None] = [True]  # the loss
    decisive: list[int] = []
    for chunk in reversed(range(1, len(answers) + 1)):
        earlier = earlier_chunk(topology, chunk)
        places = [(chunk - 1, i) for i, spec in enumerate(hops[chunk - 1]) if not spec.kept]
        if earlier is not None:
            places += [(earlier, i) for i, spec in enumerate(hops[earlier]) if spec.kept]
        inputs = tuple(found[hop][i] for hop, i in places)
        for (hop, i), spec in zip(places, used(inputs, outputs, answers[chunk - 1], decisive), strict=True):
            found[hop][i] = spec
        outputs = [spec.used if spec.requires_grad else False for spec in found[chunk - 1]]
        decisive = [i for i, spec in enumerate(found[chunk - 1]) if spec.decisive]
    return [tuple(specs) for specs in found]
