"""Announces the edge's calls to all ranks: shapes and layouts of the microbatches, never their values."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ldt.errors import LdtError
from ldt.runtime.common.error_text import type_name
from ldt.runtime.common.kept import kept_specs, sent_specs
from ldt.runtime.common.redact import InputValueError
from ldt.runtime.control.collectives import as_bytes
from ldt.runtime.control.edge_messages import MAX_CONTENT_BYTES, EdgeMessage, Subject
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.keywords import check_accepted
from ldt.runtime.step.audit import Audit, Guard
from ldt.runtime.step.call import Call
from ldt.runtime.step.metadata import MicrobatchMetadata, StepCalledOff, StepMessage, pack
from ldt.runtime.step.microbatch import Microbatch, Signatures
from ldt.runtime.step.plan_cache import PlanCache
from ldt.runtime.step.shape_cache import ShapeCache

__all__ = ["Announcement", "Announcer"]


@dataclass(frozen=True)
class Announcement:
    """A rank's announcement of a call; the leader has broadcast it. ``error`` is why the call cannot be made."""

    call: Call
    content: bytes
    setting: str
    versions: Sequence[object]
    error: Exception | None


class Announcer:
    """Announces the calls of one pipeline, on the edge. ``wanted`` names the metadata that cloud chunks accept."""

    def __init__(
        self, mesh: Mesh, shapes: ShapeCache, plans: PlanCache, wanted: Sequence[str], audit: Audit | None
    ) -> None:
        self._mesh = mesh
        self._shapes = shapes
        self._plans = plans
        self._wanted = wanted
        self._audit = audit
        self._signatures = Signatures()
        self._pending: deque[Announcement] = deque()
        self._last_content = b""

    def announce(self, call: Call, upcoming: Call | None) -> Announcement:
        """Announce ``call``, unless it was the last ``upcoming``, and ``upcoming``. Return the former announcement.

        Raises LdtError if a different call was announced.
        """
        if not self._pending:
            self._pending.append(self._write(call))
        announcement = self._pending.popleft()
        self._check(announcement, call)
        if upcoming is not None:
            self._pending.append(self._write(upcoming))
        return announcement

    def _write(self, call: Call) -> Announcement:
        error: Exception | None = None
        try:
            if call.error is not None:
                raise call.error
            assert call.microbatches is not None
            content = as_bytes(pack(self._message(call, call.microbatches)))
            if len(content) > MAX_CONTENT_BYTES:
                raise InputValueError(
                    f"the step message has {len(content)} bytes, the limit is {MAX_CONTENT_BYTES}: masks and positions "
                    "without a pattern take most of it; use fewer microbatches, or let chunks compute positions"
                )
        except Exception as caught:
            error = caught
            content = as_bytes(pack(StepCalledOff(type_name(caught), self._mesh.shareable_text(caught))))
        same = content == self._last_content
        self._last_content = content
        subject = Subject.SAME_STEP if same else Subject.STEP
        if self._mesh.is_leader:
            edge_message = EdgeMessage(subject, call.number, b"" if same else content, call.command)
            self._mesh.edge_broadcast.send(edge_message)
            if self._audit is not None:
                self._audit.write("metadata", call.serial, edge_message.nbytes)
        return Announcement(call, content, self._shapes.setting(), _versions(call), error)

    def _message(self, call: Call, microbatches: Sequence[Microbatch]) -> StepMessage:
        setting = self._shapes.setting()
        described = []
        for index, microbatch in enumerate(microbatches):
            check_accepted(microbatch.kwargs, index, self._shapes.keywords.values(), self._wanted)
            head = self._shapes.head_output(microbatch, call.training, setting)
            offered = {name: microbatch.kwargs.get(name) for name in self._wanted}
            tensors = {name: value for name, value in offered.items() if value is not None}
            if tensors:
                self._guard(index, microbatch, tensors)
            # For chunks on the edge between head and tail, equal numbers mean equal output shapes.
            number = self._signatures.number(microbatch) if self._mesh.topology.laps > 1 else index
            kept = kept_specs(head)
            outputs = (sent_specs(head), kept) if kept else (head,)
            described.append(MicrobatchMetadata(number, outputs, tensors))
        digest = self._plans.digest(len(microbatches), call.training)
        return StepMessage(call.mode, digest, setting, self._shapes.autocast(), tuple(described))

    def _guard(self, index: int, microbatch: Microbatch, tensors: Mapping[str, Any]) -> None:
        """Raise ValueError if metadata are, or are views of, data that stay on the edge."""
        others = {name: value for name, value in microbatch.kwargs.items() if name not in tensors}
        rest = Microbatch(microbatch.args, others, microbatch.target)
        guard = Guard([rest], self._audit is not None)
        guard.check(filter(_is_tensor, tensors.values()), f"metadata of microbatch {index}")

    def _check(self, announcement: Announcement, call: Call) -> None:
        announced, given = announcement.call.microbatches, call.microbatches
        if announced is given or announcement.error is not None:
            return
        if announcement.call.command != call.command:
            raise LdtError(
                f"{announcement.call.mode}() was announced (upcoming=) with update=, max_norm=, norm_type=, autocast "
                "and, for learning_rate='edge', the learning rates of the step before it: give it the same, or "
                "announce nothing"
            )
        if announcement.call.mode != call.mode:
            raise LdtError(
                f"{announcement.call.mode}() was announced (upcoming=), but {call.mode}() was called: make the call "
                "that was announced"
            )
        if not _are_the_same(announced, given) or announcement.versions != _versions(call):
            raise LdtError(
                f"{call.mode}() was announced (upcoming=) with other microbatches, or their tensors changed since: "
                "pass the same list, and do not modify its tensors"
            )
        if announcement.setting != self._shapes.setting():
            raise LdtError(
                f"autocast or the train mode of a module changed after {announcement.call.mode}() was announced "
                "(upcoming=): change them before the call is announced"
            )


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _versions(call: Call) -> list[object]:
    """Return how often each tensor was modified in place."""
    return [version for microbatch in call.microbatches or () for version in microbatch.versions()]


def _are_the_same(announced: list[Microbatch] | None, given: list[Microbatch] | None) -> bool:
    """Whether both are lists of the same objects."""
    if announced is None or given is None or len(announced) != len(given):
        return False
    return all(one.is_same(other) for one, other in zip(announced, given, strict=True))
