"""What the edge says of its calls before they begin: shapes and layouts of the microbatches, never their values."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ldt.errors import LdtError
from ldt.runtime.common.error_text import type_name
from ldt.runtime.common.redact import InputValueError
from ldt.runtime.control.collectives import as_bytes
from ldt.runtime.control.edge_broadcast import MAX_CONTENT_BYTES, EdgeMessage, Subject
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.keywords import check_taken
from ldt.runtime.step.audit import Audit, Guard
from ldt.runtime.step.call import Call
from ldt.runtime.step.metadata import MicrobatchMetadata, StepCalledOff, StepMessage, pack
from ldt.runtime.step.microbatch import Microbatch, Signatures
from ldt.runtime.step.plan_cache import PlanCache
from ldt.runtime.step.shape_cache import ShapeCache

__all__ = ["Announcement", "Announcer"]


@dataclass(frozen=True)
class Announcement:
    """What a rank of the edge says of a call; a leader has sent it. ``error`` is why the call cannot be made."""

    call: Call
    content: bytes
    setting: str
    versions: Sequence[object]
    error: Exception | None


class Announcer:
    """Those of one pipeline, of which chunks on the cloud take the metadata ``wanted``."""

    def __init__(
        self, mesh: Mesh, shapes: ShapeCache, plans: PlanCache, wanted: Sequence[str], audit: Audit | None
    ) -> None:
        self._mesh = mesh
        self._shapes = shapes
        self._plans = plans
        self._wanted = wanted
        self._audit = audit
        self._signatures = Signatures()
        self._given: deque[Announcement] = deque()
        self._content = b""  # of the last one

    def give(self, call: Call, upcoming: Call | None) -> Announcement:
        """Say what ``call`` is, unless that was said before, and what ``upcoming`` will be. Returns the former.

        Raises LdtError if another call was announced than this one.
        """
        if not self._given:
            self._given.append(self._write(call))
        announcement = self._given.popleft()
        self._check(announcement, call)
        if upcoming is not None:
            self._given.append(self._write(upcoming))
        return announcement

    def _write(self, call: Call) -> Announcement:
        error: Exception | None = None
        try:
            if isinstance(call.microbatches, Exception):
                raise call.microbatches
            assert call.microbatches is not None
            content = as_bytes(pack(self._message(call, call.microbatches)))
            if len(content) > MAX_CONTENT_BYTES:
                raise InputValueError(
                    f"the message of the step has {len(content)} bytes, at most {MAX_CONTENT_BYTES} can be sent: masks "
                    "and positions by no rule take most; give the step fewer microbatches, or let chunks find positions"
                )
        except Exception as caught:
            error = caught
            content = as_bytes(pack(StepCalledOff(type_name(caught), self._mesh.shareable_text(caught))))
        same = content == self._content
        self._content = content
        subject = Subject.SAME_STEP if same else Subject.STEP
        if self._mesh.is_leader:
            edge_message = EdgeMessage(subject, call.number, b"" if same else content)
            self._mesh.edge_broadcast.send(edge_message)
            if self._audit is not None:
                self._audit.write("metadata", call.serial, edge_message.nbytes)
        return Announcement(call, content, self._shapes.setting(), _versions(call), error)

    def _message(self, call: Call, microbatches: Sequence[Microbatch]) -> StepMessage:
        setting = self._shapes.setting()
        described = []
        for index, microbatch in enumerate(microbatches):
            check_taken(microbatch.kwargs, index, self._shapes.keywords.values(), self._wanted)
            head = self._shapes.head_output(microbatch, call.training, setting)
            offered = {name: microbatch.kwargs.get(name) for name in self._wanted}
            tensors = {name: value for name, value in offered.items() if value is not None}
            if tensors:
                self._guard(index, microbatch, tensors)
            # Where chunks on the edge come later, equal numbers say that they return equal shapes.
            number = self._signatures.number(microbatch) if self._mesh.topology.laps > 1 else index
            described.append(MicrobatchMetadata(number, (head,), tensors))
        digest = self._plans.digest(len(microbatches), call.training)
        return StepMessage(call.mode, digest, setting, self._shapes.autocast(), tuple(described))

    def _guard(self, index: int, microbatch: Microbatch, tensors: Mapping[str, Any]) -> None:
        """Raise ValueError if metadata are, or are views of, what stays on the edge."""
        others = {name: value for name, value in microbatch.kwargs.items() if name not in tensors}
        rest = Microbatch(microbatch.args, others, microbatch.target)
        guard = Guard([rest], self._audit is not None)
        guard.check(filter(_is_tensor, tensors.values()), f"metadata of microbatch {index}")

    def _check(self, announcement: Announcement, call: Call) -> None:
        said, given = announcement.call.microbatches, call.microbatches
        if said is given or announcement.error is not None:
            return
        if announcement.call.mode != call.mode:
            raise LdtError(
                f"the call {announcement.call.mode}() was announced (upcoming=), but {call.mode}() is made: make the "
                "call that was announced"
            )
        if not _are_the_same(said, given) or announcement.versions != _versions(call):
            raise LdtError(
                f"the call {call.mode}() was announced (upcoming=) with other microbatches, or their tensors were "
                "changed since: give the same list, and leave its tensors alone"
            )
        if announcement.setting != self._shapes.setting():
            raise LdtError(
                f"the call {announcement.call.mode}() was announced (upcoming=) in another setting than it was made "
                "in: switch autocast and the mode of modules before a call is announced, not after it"
            )


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _versions(call: Call) -> list[object]:
    """How often each tensor was changed in place."""
    microbatches = call.microbatches if isinstance(call.microbatches, list) else []
    return [version for microbatch in microbatches for version in microbatch.versions()]


def _are_the_same(said: object, given: object) -> bool:
    """Whether these are lists of the same objects."""
    if not (isinstance(said, list) and isinstance(given, list) and len(said) == len(given)):
        return False
    return all(one.is_same(other) for one, other in zip(said, given, strict=True))
