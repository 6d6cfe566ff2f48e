"""How a step begins: the edge says in one message what it is about, and every rank agrees or refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ldt.errors import LdtError, RemoteStageError
from ldt.runtime.mesh import Mesh
from ldt.runtime.microbatch import Microbatch
from ldt.runtime.shapes import ShapeBook
from ldt.runtime.specs import HopSpecs, TensorSpec

__all__ = ["Agreement", "Mode", "Refusal", "open_step"]

Mode = Literal["step", "eval"]


class Refusal(Exception):  # noqa: N818 (a verdict, not an error of its own)
    """The step was called off on all ranks, nothing was sent; the mesh stays usable. ``error`` is to be raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class Agreement:
    """``hops[m][c]`` is what hop c -> c+1 carries for microbatch m of this rank's replica."""

    num_microbatches: int
    hops: Sequence[Sequence[HopSpecs]]


def open_step(
    mesh: Mesh,
    shapes: ShapeBook,
    mode: Mode,
    serial: int,
    microbatches: Sequence[Microbatch] | Exception | None,
) -> Agreement:
    """Agree on a step. A collective call of all ranks.

    On the edge ``microbatches`` are this rank's, or the reason why there are none, which the edge's leaders pass on.
    Raises Refusal where a leader of the edge has such a reason; anything else it raises is a failure.
    """
    messages = _exchange(mesh, shapes, mode, serial, microbatches)
    for message in messages:
        if (message["mode"], message["serial"]) != (mode, serial):
            raise LdtError(
                f"this rank is at call {serial} of this pipeline, {mode}(), but the edge is at call "
                f"{message['serial']}, {message['mode']}(): every rank must make the same calls in the same order"
            )
    counts = [len(message["microbatches"]) for message in messages]
    if len(set(counts)) > 1:
        raise LdtError(f"the replicas of the edge must have equally many microbatches, they have {counts}")
    if mesh.topology.num_stages == 1:  # every hop is local, and its chunks see for themselves
        return Agreement(counts[0], ())
    hops = [_hops(shapes, message, replica, mode) for replica, message in enumerate(messages)]
    return Agreement(counts[0], hops[mesh.replica])


def _exchange(
    mesh: Mesh,
    shapes: ShapeBook,
    mode: Mode,
    serial: int,
    microbatches: Sequence[Microbatch] | Exception | None,
) -> list[dict[str, Any]]:
    """The messages of all edge leaders, by replica."""
    own: dict[str, Any] | None = None
    error: Exception | None = None
    if mesh.is_edge:
        try:
            if isinstance(microbatches, Exception):
                raise microbatches
            assert microbatches is not None
            own = _describe(mesh, shapes, mode, serial, microbatches)
        except Exception as caught:
            if not mesh.is_leader:
                raise
            error, own = caught, {"error": f"{type(caught).__name__}: {caught}"}
    leaders = [mesh.edge_leader(replica) for replica in range(mesh.topology.edge_dp)]
    messages = [mesh.control.broadcast(own, leader, patient=True) for leader in leaders]
    if error is not None:
        raise Refusal(error)
    for leader, message in zip(leaders, messages, strict=True):
        if "error" in message:
            rank = mesh.ranks[leader]
            raise Refusal(RemoteStageError(f"rank {rank}, the edge, called {mode}() off: {message['error']}"))
    if own is not None and own != messages[mesh.replica]:
        raise LdtError(
            "the ranks of the edge must be given equal microbatches: this rank's differ from its leader's in number, "
            "shape or dtype"
        )
    return messages


def _describe(
    mesh: Mesh, shapes: ShapeBook, mode: Mode, serial: int, microbatches: Sequence[Microbatch]
) -> dict[str, Any]:
    """The step message: only what the head's outputs look like leaves the edge."""
    numbers: dict[HopSpecs, int] = {}
    if mesh.topology.num_stages > 1:
        heads = [shapes.head_output(m.signature, m.args, m.kwargs, mode == "step") for m in microbatches]
    else:
        heads = [()] * len(microbatches)
    indices = [numbers.setdefault(head, len(numbers)) for head in heads]
    specs = [[spec.to_json() for spec in head] for head in numbers]
    return {"mode": mode, "serial": serial, "specs": specs, "microbatches": indices}


def _hops(shapes: ShapeBook, message: dict[str, Any], replica: int, mode: Mode) -> list[list[HopSpecs]]:
    firsts = [tuple(map(TensorSpec.from_json, head)) for head in message["specs"]]
    chains = [shapes.hops(first, replica, mode == "step") for first in firsts]
    return [chains[index] for index in message["microbatches"]]
