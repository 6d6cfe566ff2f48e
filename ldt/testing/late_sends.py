"""A link on which what is sent is read as late as can be: when all that its rank can do before has run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from ldt.plan import Action, Kind, Plan, add_communication
from ldt.runtime import Mesh
from ldt.runtime.comm.endpoint import Endpoint
from ldt.topology import Topology

__all__ = ["each_kind_at_once", "hold_sends"]


Release = Callable[[str, Sequence[torch.Tensor]], object]


def hold_sends(mesh: Mesh, on_release: Release = lambda label, tensors: None) -> None:
    """For the next step, of ``each_kind_at_once``: to be called on all ranks before each.

    A send starts when its rank first waits for a kind of message that it had not waited for when it was given the
    tensors, or for the send itself. ``on_release`` is called before with its label and the tensors.
    """
    held = _Held(on_release)
    for channel, end in mesh.endpoints.items():
        mesh.endpoints[channel] = _LateEnd(getattr(end, "end", end), held)


def each_kind_at_once(topology: Topology, num_microbatches: int, split_backward: bool = False) -> Plan:
    """All forwards of a chunk, then all its backwards; the last chunk's in turn. Weights of a split backward last."""
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


class _Held:
    """The sends of a rank that have not started, and the kinds of messages that it has waited for."""

    def __init__(self, on_release: Release) -> None:
        self._on_release = on_release
        self._sends: list[_LateSend] = []
        self._heard: set[str] = set()

    def add(self, send: _LateSend) -> None:
        self._sends.append(send)

    def hear(self, kind: str) -> None:
        """A wait for a message of ``kind``, such as "F0", begins."""
        if kind not in self._heard:
            self._heard.add(kind)
            self.release()

    def release(self) -> None:
        sends, self._sends = self._sends, []
        for send in sends:
            self._on_release(send.label, send.tensors)
            send.begin()


class _LateEnd(Endpoint):
    def __init__(self, end: Endpoint, held: _Held) -> None:
        super().__init__(**{field.name: getattr(end, field.name) for field in fields(Endpoint)})
        self.__dict__.update(end=end, held=held)  # the class is frozen
        self.held: _Held

    def send(self, tensors: Sequence[torch.Tensor], label: str, specs: Any = None) -> Any:
        start = super().send
        send = _LateSend(self.held, label, tensors, lambda: start(tensors, label, specs))
        self.held.add(send)
        return send

    def receive(self, tensors: Sequence[torch.Tensor], label: str, specs: Any = None) -> Any:
        return _Receive(self.held, label.split()[0], super().receive(tensors, label, specs))


class _LateSend:
    """As a ``dist.Work``, as far as the runtime uses one."""

    def __init__(
        self, held: _Held, label: str, tensors: Sequence[torch.Tensor], start: Callable[[], Any]
    ) -> None:
        self.label, self.tensors = label, tensors
        self._held, self._start = held, start
        self._begun = False
        self._work: Any = None  # stays None where other ranks of the node send all of it

    def begin(self) -> None:
        self._begun, self._work = True, self._start()

    def wait(self) -> bool:
        if not self._begun:
            self._held.release()
        return self._work is None or bool(self._work.wait())

    def is_completed(self) -> bool:
        return self._begun and (self._work is None or bool(self._work.is_completed()))


class _Receive:
    def __init__(self, held: _Held, kind: str, work: Any) -> None:
        self._held, self._kind, self._work = held, kind, work

    def wait(self) -> bool:
        self._held.hear(self._kind)
        return bool(self._work.wait())

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())
