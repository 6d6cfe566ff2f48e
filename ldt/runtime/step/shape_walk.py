"""Follows what microbatches carry from chunk to chunk."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from ldt.runtime.common.auxiliary_loss import carried_names, losses_spec
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.dry_run.grad_flow import InferredOutputs, used
from ldt.runtime.step.metadata import StepMessage
from ldt.topology import Topology

__all__ = ["Query", "ShapeWalk"]

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
        self._hops = [list(microbatch.hops[:1]) for microbatch in message.microbatches]
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
            found = [_with_usage(*pair) for pair in zip(self._hops, self._answers, strict=True)]
        return [
            [(*specs, *carried) for specs, carried in zip(hops, of_hops, strict=True)]
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
                carried[-1],
                (self._metadata_key(self.chunk, microbatch.tensors), microbatch.id if numbered else None),
                self._training,
                self.message.setting,
            )
            for carried, microbatch in zip(self._hops, self.message.microbatches, strict=True)
        ]


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
