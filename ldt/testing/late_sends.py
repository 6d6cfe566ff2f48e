"""Delays sends as long as possible: until everything that the rank can run before them has run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from ldt.plan import Action, Kind, Plan, add_communication
from ldt.runtime import Mesh
from ldt.runtime.comm.endpoint import Endpoint, Parts
from ldt.topology import Topology

__all__ = ["each_kind_at_once", "hold_sends"]


Release = Callable[[str, Sequence[torch.Tensor]], object]


def hold_sends(mesh: Mesh, on_release: Release = lambda label, tensors: None) -> None:
    """Hold the sends of the next step of ``each_kind_at_once``. Call it on all ranks before each step.

    A send starts when its rank waits for the send itself, or for the first time for a kind of message that it had not
    waited for when the send was launched. ``on_release`` is called before that with the label and the tensors.
    """
    held = _HeldSends(on_release)
    for channel, endpoint in mesh.endpoints.items():
        mesh.endpoints[channel] = _LateEndpoint(getattr(endpoint, "endpoint", endpoint), held)


def each_kind_at_once(topology: Topology, num_microbatches: int, split_backward: bool = False) -> Plan:
    """A plan with all forwards of a chunk, then all its backwards; the last chunk alternates. W actions come last."""
    if topology.laps != 1 or topology.dp != 1:
        raise ValueError("expected one lap and one replica")
    middle = (Kind.I, Kind.W) if split_backward else (Kind.B,)
    rows = {}
    for node in topology.nodes:
        phases: list[tuple[int, tuple[Kind, ...]]] = [(topology.chunks_of(node.stage)[0], (Kind.F,))]
        if node.stage == 0:
            phases += [(topology.tail, (Kind.F, Kind.B)), (0, (Kind.B,))]
        else:
            phases += [(node.stage, (kind,)) for kind in middle]
        rows[node] = [
            Action(chunk, kind, microbatch)
            for chunk, kinds in phases
            for microbatch in range(num_microbatches)
            for kind in kinds
        ]
    return add_communication(Plan(topology, num_microbatches, rows), "dedicated", num_microbatches)


class _HeldSends:
    """The sends of a rank that have not started, and the kinds of messages that it has waited for."""

    def __init__(self, on_release: Release) -> None:
        self._on_release = on_release
        self._sends: list[_LateSend] = []
        self._waited_for: set[str] = set()

    def add(self, send: _LateSend) -> None:
        self._sends.append(send)

    def begin_wait(self, kind: str) -> None:
        """A wait for a message of ``kind``, such as "F0", begins."""
        if kind not in self._waited_for:
            self._waited_for.add(kind)
            self.release()

    def release(self) -> None:
        sends, self._sends = self._sends, []
        for send in sends:
            self._on_release(send.label, send.tensors)
            send.start()


class _LateEndpoint(Endpoint):
    def __init__(self, endpoint: Endpoint, held: _HeldSends) -> None:
        super().__init__(**{field.name: getattr(endpoint, field.name) for field in fields(Endpoint)})
        self.__dict__.update(endpoint=endpoint, held=held)  # the class is frozen
        self.held: _HeldSends

    def send_parts(self, parts: Parts, label: str) -> Any:
        start = super().send_parts
        tensors = [tensor for part in parts.values() for tensor in part]
        send = _LateSend(self.held, label, tensors, lambda: start(parts, label))
        self.held.add(send)
        return send

    def receive_parts(self, parts: Parts, label: str) -> Any:
        return _Receive(self.held, label.split()[0], super().receive_parts(parts, label))


class _LateSend:
    """The part of a ``dist.Work`` that the runtime uses."""

    def __init__(
        self, held: _HeldSends, label: str, tensors: Sequence[torch.Tensor], start: Callable[[], Any]
    ) -> None:
        self.label, self.tensors = label, tensors
        self._held, self._launch = held, start
        self._started = False
        self._work: Any = None  # stays None if other ranks of the node send the whole message

    def start(self) -> None:
        self._started, self._work = True, self._launch()

    def wait(self) -> bool:
        if not self._started:
            self._held.release()
        return self._work is None or bool(self._work.wait())

    def is_completed(self) -> bool:
        return self._started and (self._work is None or bool(self._work.is_completed()))


class _Receive:
    def __init__(self, held: _HeldSends, kind: str, work: Any) -> None:
        self._held, self._kind, self._work = held, kind, work

    def wait(self) -> bool:
        self._held.begin_wait(self._kind)
        return bool(self._work.wait())

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())
