"""What every hop of a step will carry: asked once of the chunks, agreed on by all ranks, and remembered."""

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
from ldt.runtime.dry_run.grad_flow import Answer, Reach, used
from ldt.runtime.dry_run.shape_inference import infer, infer_reach, warm_up
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.keywords import declares, keywords_of
from ldt.runtime.step.metadata import METADATA_NAMES, StepMessage
from ldt.runtime.step.microbatch import Microbatch

__all__ = ["ShapeCache"]

KEPT_ANSWERS = 4096  # of the head, and of the other chunks


class _Question(NamedTuple):
    """What does ``chunk`` return for ``inputs``? Equal ones have equal answers, on every rank."""

    chunk: int
    inputs: HopSpecs
    given: Hashable  # of what it may be given by name
    training: bool
    setting: str


class ShapeCache:
    """The specs of hops c -> c+1 for every microbatch of a step, the same on all ranks.

    The edge says what hop 0 carries, and in which setting; what was not met before in that one, each chunk's leader
    infers and tells all, for all microbatches at once, and with it which of its inputs get a gradient. Answers are kept
    until ``forget``, the most recent 4096 of the head and of the other chunks. Hops within a node are found by the way
    and have no specs here.
    ``reads`` has by chunk the metadata whose values its answer may depend on, for chunks of all nodes, ``number`` is
    that of the pipeline, and ``loss_trains`` says that its loss has weights of its own.
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
        self._heads: LruCache[HopSpecs] = LruCache(KEPT_ANSWERS)
        self._outputs: LruCache[Answer] = LruCache(KEPT_ANSWERS)

    def autocast(self) -> str | None:
        """The dtype that autocast casts to on this rank's device, None where it is off."""
        kind = self._mesh.device.type
        return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None

    def setting(self) -> str:
        """What may give one input other shapes: autocast, and which modules are in train mode.

        The edge's stands for that of all ranks, as both are switched everywhere between the same two steps.
        """
        modes = bytes(part.training for chunk in self.chunks.values() for part in chunk.modules())
        return f"autocast={self.autocast()} modes={hashlib.sha256(modes).hexdigest()[:16]}"

    def forget(self) -> None:
        """Infer everything anew from the next step on. To be called on all ranks between the same two steps."""
        self._heads.clear()
        self._outputs.clear()

    def head_output(self, microbatch: Microbatch, training: bool, setting: str) -> HopSpecs:
        """What hop 0 carries for a microbatch. Edge only, local."""
        if not self._topology.crosses(0):
            return ()
        key = (microbatch.signature, self._given(0, microbatch.kwargs), training, setting)
        return self._heads.get(
            key, lambda: self._infer(0, microbatch.args, microbatch.kwargs, training).specs
        )

    def hops(
        self, message: StepMessage, replica: int, training: bool, samples: Sequence[Mapping[str, Any]]
    ) -> list[list[HopSpecs]]:
        """What each hop carries, for each microbatch that ``message`` of an edge's ``replica`` names.

        ``samples`` are, on that replica, its inputs by name. A collective call of all ranks.
        """
        if not self._topology.channels:
            return [[()] * self._topology.tail for _ in message.microbatches]
        hops = [list(microbatch.hops[:1]) for microbatch in message.microbatches]
        answers: list[list[Answer]] = [[] for _ in hops]
        for chunk in range(1, self._topology.num_chunks if training else self._topology.tail):
            # The edge may have inputs that metadata do not tell of: the number of their signature stands for them.
            local = self._topology.stage_of(chunk) == 0
            numbered = local and chunk < self._topology.tail
            given = [
                (self._given(chunk, m.tensors), m.id if numbered else None) for m in message.microbatches
            ]
            questions = [
                _Question(chunk, carried[-1], names, training, message.setting)
                for carried, names in zip(hops, given, strict=True)
            ]
            offered = samples if local else [microbatch.tensors for microbatch in message.microbatches]
            found = self._ask(questions, replica, offered)
            for carried, known, question in zip(hops, answers, questions, strict=True):
                known.append(found[question])
                if chunk < self._topology.tail:
                    carried.append(found[question].specs)
        for hop in range(self._topology.tail):
            for specs in {carried[hop] for carried in hops}:
                self._check_split(hop, specs, replica)
        return [_with_use(*pair) for pair in zip(hops, answers, strict=True)] if training else hops

    def _ask(
        self, questions: Sequence[_Question], replica: int, offered: Sequence[Mapping[str, Any]]
    ) -> dict[_Question, Answer]:
        """The answers. New ones the chunk's ranks infer, and one leader's word goes to all, in one message.

        All replicas of a cloud stage compare; on the edge only the one that has these microbatches can.
        """
        known = {question: self._outputs.find(question) for question in questions}
        new = {question: questions.index(question) for question, answer in known.items() if answer is None}
        if new:
            node = self._topology.node_at(questions[0].chunk, replica)
            mine = None
            if node == self._mesh.node or (node.stage == self._mesh.stage and not self._mesh.is_edge):
                mine = [self._infer(q.chunk, q.inputs, offered[at], q.training) for q, at in new.items()]
            message = None if mine is None else [answer.to_json() for answer in mine]
            agreed = self._mesh.control.broadcast(message, node, partial(_answers, list(new)))
            self._compare(questions[0].chunk, agreed, mine)
            for question, answer in zip(new, agreed, strict=True):
                known[question] = self._outputs.get(question, lambda answer=answer: answer)  # type: ignore[misc]
        return known  # type: ignore[return-value]

    def _compare(self, chunk: int, agreed: Sequence[Answer], mine: Sequence[Answer] | None) -> None:
        for (leaders, *_), (own, *_) in zip(agreed, mine or agreed, strict=True):
            if own != leaders:
                raise LdtError(
                    f"the ranks of stage {self._mesh.stage} disagree on what chunk {chunk} returns: its leader says "
                    f"{describe(leaders)}, rank {self._mesh.ranks[self._mesh.rank]} says {describe(own)}; "
                    "they must hold equal modules"
                )

    def _check_split(self, hop: int, specs: HopSpecs, replica: int) -> None:
        """Raise LdtError where tensors are split over ranks and the strands of their link are not for that."""
        split = [spec for spec in specs if spec.shard is not None]
        if split and not self._mesh.transfers.can_split(self._topology.channel(hop, "F", replica)):
            raise LdtError(
                f"chunk {hop} returns {describe(split)}, which this link has no way to carry: connect with "
                'transfer="direct" or "auto", for all links or for this one, or let the chunk return full_tensor()'
            )

    def _given(self, chunk: int, tensors: Mapping[str, Any]) -> Hashable:
        """What an answer may depend on in metadata: all shapes, and the values that the chunk reads for it."""
        metadata = {
            name: tensors[name] for name in METADATA_NAMES if isinstance(tensors.get(name), torch.Tensor)
        }
        reads = self._reads.get(chunk, ())
        return tuple(
            (name, TensorSpec.of(tensor), _digest(tensor) if name in reads else b"")
            for name, tensor in metadata.items()
        )

    def _infer(self, chunk: int, args: Sequence[Any], offered: Mapping[str, Any], training: bool) -> Answer:
        """For ``args`` that are tensors or specs. The last chunk's only output is the loss."""
        mesh, module = self._mesh, self.chunks[chunk]
        kwargs = self.keywords_for(chunk, offered, len(args))
        if chunk == self._topology.tail:
            return infer_reach(module, args, kwargs, mesh.device, mesh.shards, self._loss_trains)
        try:
            answer = infer(chunk, module, args, kwargs, mesh.device, training, mesh.shards)
        except QuotingError as error:
            raise error.and_also(self.hooks.advice(chunk, module)) from error.__cause__
        self.hooks.tell(chunk, module)
        return answer

    def keywords_for(self, chunk: int, offered: Mapping[str, Any], given: int) -> dict[str, Any]:
        """What ``chunk`` takes by name of what is ``offered``, behind ``given`` tensors of a hop."""
        kwargs = self.keywords[chunk].pick(offered, given)
        if self._mesh.is_edge or declares(self.chunks[chunk]):
            return kwargs
        # Metadata, which are read on the CPU here, will be on the device.
        return {name: TensorSpec.of(tensor) for name, tensor in kwargs.items()}


def _with_use(hops: Sequence[HopSpecs], answers: Sequence[Answer]) -> list[HopSpecs]:
    """The hops of a microbatch with what is known of their tensors' use, from the loss back to the first chunk."""
    found: list[HopSpecs] = []
    outputs: list[bool | None] = [True]  # the loss
    decisive: list[int] = []
    for inputs, answer in zip(reversed(hops[: len(answers)]), reversed(answers), strict=True):
        found.append(used(inputs, outputs, answer, decisive))
        outputs = [spec.used if spec.requires_grad else False for spec in found[-1]]
        decisive = [i for i, spec in enumerate(found[-1]) if spec.decisive]
    return [*reversed(found), *hops[len(answers) :]]


def _answers(questions: Sequence[_Question], value: Any) -> list[Answer]:
    """Read what another rank says. Raises ValueError where that is no answer to the questions."""
    answers = [
        Answer(tuple(map(TensorSpec.from_json, specs)), _reaches(told), tuple(map(int, reentrant)))
        for specs, told, reentrant in value
    ]
    if len(answers) != len(questions):
        raise ValueError(f"expected the specs of {len(questions)} microbatches, got {len(answers)}")
    for question, answer in zip(questions, answers, strict=True):
        numbers = {*answer.reentrant, *(i for reach in answer.reaches for numbers in reach for i in numbers)}
        outputs = len(answer.specs) or len(answer.reaches)  # those of the last chunk have no specs
        if (
            not numbers <= set(range(len(question.inputs)))
            or len(answer.reaches) != question.training * outputs
        ):
            raise ValueError("expected for each output the numbers of inputs that it reaches, got others")
    return answers


def _reaches(told: Any) -> tuple[Reach, ...]:
    return tuple(Reach(*(tuple(map(int, numbers)) for numbers in reach)) for reach in told)


def _digest(tensor: torch.Tensor) -> bytes:
    """Of its elements. Waits for the device."""
    return hashlib.sha256(as_bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))).digest()
