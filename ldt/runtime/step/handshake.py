"""Begins a step: every rank receives the edge's step message and learns the specs of every hop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ldt.errors import LdtError, RemoteStageError
from ldt.plan import Plan
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.control.collectives import as_tensor
from ldt.runtime.control.edge_messages import EdgeMessage, Subject
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.step.announce import Announcement, Announcer
from ldt.runtime.step.call import Call, Mode, StepRejected
from ldt.runtime.step.compression_advice import CompressionAdvice
from ldt.runtime.step.metadata import StepCalledOff, StepMessage, unpack
from ldt.runtime.step.plan_cache import PlanCache
from ldt.runtime.step.shape_cache import ShapeCache

__all__ = ["Handshake", "StepContext"]


@dataclass(frozen=True)
class StepContext:
    """The result of a handshake.

    ``hops[m][c]`` has the specs of hop c -> c+1 for microbatch m of this rank's edge replica. ``keywords[m]`` are the
    keyword arguments available to this rank's chunks: the inputs on the edge, the metadata on the cloud. ``by_edge``
    has the specs of hops and the message of every edge replica. The replicas of the stages in ``lockstep`` synchronize
    in every action.
    """

    plan: Plan
    hops: Sequence[Sequence[HopSpecs]]
    keywords: Sequence[Mapping[str, Any]]
    by_edge: Sequence[tuple[Sequence[Sequence[HopSpecs]], StepMessage]]
    lockstep: Collection[int]


class Handshake:
    """Opens the calls of one pipeline. Only the edge has an ``announcer``."""

    def __init__(self, mesh: Mesh, shapes: ShapeCache, plans: PlanCache, announcer: Announcer | None) -> None:
        self._mesh = mesh
        self._shapes = shapes
        self._plans = plans
        self._announcer = announcer
        self._advice = CompressionAdvice(mesh)
        # Shapes of hops mostly follow from those of metadata: on the meta device no elements are rebuilt.
        self._shapes_device = torch.device("cpu" if shapes.reads_values else "meta")
        self._contents: dict[int, bytes] = {}  # the last content from each edge replica
        self._messages: dict[int, StepMessage | StepCalledOff] = {}  # unpacked contents

    def open(self, call: Call, upcoming: Call | None = None) -> StepContext:
        """Agree on ``call``; the edge also announces ``upcoming``. A collective call of all ranks.

        Raises StepRejected if a leader of the edge calls it off. Any other exception is a failure of the mesh.
        """
        mesh = self._mesh
        announcement = None if self._announcer is None else self._announcer.announce(call, upcoming)
        edge_messages = mesh.edge_broadcast.receive()
        for replica, edge_message in enumerate(edge_messages):
            self._read(replica, edge_message)
        for replica in range(len(edge_messages)):
            self._raise_if_called_off(replica, call, announcement)
        if announcement is not None:
            _check_leader(announcement, self._contents[mesh.replica], edge_messages[mesh.replica].command)
        elif call.error is not None:
            raise call.error
        if any(edge_message.subject is Subject.COMMAND for edge_message in edge_messages):
            raise LdtError(
                f"the edge has a command for ranks that follow it, but this rank called {call.mode}(): call "
                "ldt.follow() here, or use no ldt.Leader there"
            )
        messages = [
            self._step_message(replica, edge_message, call)
            for replica, edge_message in enumerate(edge_messages)
        ]
        plan = self._agreed_plan(call, messages)
        keywords = self._keywords(call)
        hops = self._shapes.hops(messages, call, keywords)
        own = hops[mesh.rank_info.edge_replica]
        for specs in own:
            self._advice.check(specs, self._shapes.autocast())
        return StepContext(plan, own, keywords, list(zip(hops, messages, strict=True)), self._plans.lockstep)

    def _read(self, replica: int, edge_message: EdgeMessage) -> None:
        """Unpack the message, also on the edge that packed it: so all ranks ask the same about shapes."""
        if edge_message.subject is Subject.STEP:
            self._contents[replica] = edge_message.content
            self._messages[replica] = self._unpacked(replica, self._shapes_device)

    def _unpacked(self, replica: int, device: torch.device) -> StepMessage | StepCalledOff:
        with torch.inference_mode(False):  # so that chunks may modify the tensors
            return unpack(as_tensor(self._contents[replica]), device)

    def _keywords(self, call: Call) -> list[Mapping[str, Any]]:
        """Return the keywords of each microbatch. Metadata are rebuilt for each call, as chunks may modify them."""
        if call.microbatches is not None:
            return [microbatch.kwargs for microbatch in call.microbatches]
        message = self._unpacked(self._mesh.rank_info.edge_replica, self._mesh.device)
        assert isinstance(message, StepMessage)
        return [microbatch.tensors for microbatch in message.microbatches]

    def _raise_if_called_off(self, replica: int, call: Call, announcement: Announcement | None) -> None:
        """Raise StepRejected if a leader of the edge calls it off."""
        message = self._messages.get(replica)
        if isinstance(message, StepCalledOff):
            local = call.error if announcement is None else announcement.error
            raise StepRejected(local or self._called_off(replica, call.mode, message))

    def _called_off(self, replica: int, mode: Mode, message: StepCalledOff) -> RemoteStageError:
        rank = self._mesh.ranks[self._mesh.rank_info.edge_leader(replica)]
        return RemoteStageError(
            f"rank {rank}, the edge, called {mode}() off: {message.error_text}",
            rank=rank,
            stage=0,
            place=f"the beginning of {mode}()",
            error_type=message.error_type,
        )

    def _step_message(self, replica: int, edge_message: EdgeMessage, call: Call) -> StepMessage:
        message = self._messages.get(replica)
        if not isinstance(message, StepMessage):
            raise LdtError(
                "the edge refers to a message that this rank never received: every rank must make the same calls in "
                "the same order"
            )
        if (message.mode, edge_message.number) != (call.mode, call.number):
            other = "" if edge_message.number >> 32 == call.number >> 32 else " of another pipeline"
            raise LdtError(
                f"this rank is at call {call.serial} of this pipeline, {call.mode}(), but the edge is at call "
                f"{edge_message.number & 0xFFFFFFFF}{other}, {message.mode}(), or has announced it (upcoming=): every "
                "rank must make the same calls in the same order"
            )
        return message

    def _agreed_plan(self, call: Call, messages: Sequence[StepMessage]) -> Plan:
        counts = [len(message.microbatches) for message in messages]
        if len(set(counts)) > 1:
            raise LdtError(f"the edge replicas must have the same number of microbatches, got {counts}")
        autocast = self._shapes.autocast()
        others = [message.autocast for message in messages if message.autocast != autocast]
        if others:
            raise LdtError(
                f"autocast must be the same on all ranks: here it is {autocast or 'off'}, on the edge "
                f"{others[0] or 'off'}"
            )
        digest = self._plans.digest(counts[0], call.training)
        for replica, message in enumerate(messages):
            if message.plan != digest:
                rank = self._mesh.ranks[self._mesh.rank_info.edge_leader(replica)]
                raise LdtError(
                    f"this rank's plan for {counts[0]} microbatches of {call.mode}() differs from that of rank {rank}, "
                    f"the edge: got {digest}, expected {message.plan}; plan_factory must return equal plans on all "
                    "ranks, so it must not depend on the rank, on measurements or on random numbers"
                )
        return self._plans.get(counts[0], call.training)


def _check_leader(announcement: Announcement, leaders: bytes, command: bytes) -> None:
    """Raise if this rank's announcement differs from that of its edge replica's leader."""
    if announcement.error is not None:  # on this rank alone: the leader is about to run the call
        raise announcement.error
    if announcement.content != leaders:
        raise LdtError(
            "the ranks of the edge must have equal microbatches and plans, the same autocast and the same modules in "
            "train mode: this rank differs from its leader in number, shape, dtype, plan or mode"
        )
    if announcement.call.command != command:
        raise LdtError("the ranks of the edge must make the same calls of ldt.Leader: this one differs")
