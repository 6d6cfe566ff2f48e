"""How pipelines and steps begin: every rank hears what the others have in mind, and agrees or refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ldt.errors import LdtError, RemoteStageError
from ldt.plan import Plan
from ldt.runtime.mesh import Mesh
from ldt.runtime.microbatch import Microbatch
from ldt.runtime.plans import PlanBook
from ldt.runtime.shapes import ShapeBook
from ldt.runtime.specs import HopSpecs, TensorSpec

__all__ = ["Agreement", "Call", "Mode", "Refusal", "agree", "open_step"]

Mode = Literal["step", "eval"]


class Refusal(Exception):  # noqa: N818 (a verdict, not an error of its own)
    """The step was called off on all ranks, nothing was sent; the mesh stays usable. ``error`` is to be raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class Call:
    """One call of step() or eval() on this rank, the ``serial``-th of its pipeline.

    On the edge ``microbatches`` are this rank's, or the reason why there are none, which the edge's leaders pass on.
    """

    mode: Mode
    serial: int
    microbatches: Sequence[Microbatch] | Exception | None

    @property
    def training(self) -> bool:
        return self.mode == "step"


@dataclass(frozen=True)
class Agreement:
    """``hops[m][c]`` is what hop c -> c+1 carries for microbatch m of this rank's edge replica."""

    plan: Plan
    hops: Sequence[Sequence[HopSpecs]]


def agree(
    mesh: Mesh, call: str, error: Exception | None, same: Mapping[str, str], own: object = None
) -> list[Any]:
    """Raise on every rank if one cannot begin ``call`` for an ``error``, or was given other values.

    A collective call. ``same`` has what must be equal, by the name it has in texts. Returns each rank's ``own``.
    """
    mine = {
        "error": None if error is None else mesh.tell(error),
        "error_type": None if error is None else type(error).__name__,
        "same": dict(same),
        "own": own,
    }
    with mesh.collective(call):
        answers = dict(zip(mesh.ranks, mesh.control.gather(mine), strict=True))
    if error is not None:
        raise error
    for rank, answer in answers.items():
        if answer["error"] is not None:
            raise RemoteStageError(
                f"rank {rank} cannot begin {call}: {answer['error']}",
                rank=rank,
                stage=mesh.stage_of(rank),
                place=f"the beginning of {call}",
                error_type=answer["error_type"],
            )
    for what, value in same.items():
        others = [rank for rank, answer in answers.items() if answer["same"][what] != value]
        if others:
            raise LdtError(
                f"every rank must be given the same: ranks {others} have other {what} than this rank"
            )
    return [answer["own"] for answer in answers.values()]


def open_step(mesh: Mesh, shapes: ShapeBook, plans: PlanBook, call: Call) -> Agreement:
    """Agree on a step. A collective call of all ranks.

    Raises Refusal where a leader of the edge has a reason not to run; anything else it raises is a failure.
    """
    messages = _exchange(mesh, shapes, plans, call)
    for message in messages:
        if (message["mode"], message["serial"]) != (call.mode, call.serial):
            raise LdtError(
                f"this rank is at call {call.serial} of this pipeline, {call.mode}(), but the edge is at call "
                f"{message['serial']}, {message['mode']}(): every rank must make the same calls in the same order"
            )
    counts = [len(message["microbatches"]) for message in messages]
    if len(set(counts)) > 1:
        raise LdtError(f"the replicas of the edge must have equally many microbatches, they have {counts}")
    others = [message["autocast"] for message in messages if message["autocast"] != shapes.autocast()]
    if others:
        raise LdtError(
            f"autocast must be the same on all ranks: here it is {shapes.autocast() or 'off'}, on the edge "
            f"{others[0] or 'off'}"
        )
    plan = plans.get(counts[0], call.training)
    digest = plans.digest(counts[0], call.training)
    for leader, message in zip(_edge_leaders(mesh), messages, strict=True):
        if message["plan"] != digest:
            raise LdtError(
                f"this rank's plan for {counts[0]} microbatches of {call.mode}() is not that of rank "
                f"{mesh.ranks[leader]}, the edge: {digest}, expected {message['plan']}; plan_factory must give equal "
                "plans on all ranks, so it may not depend on the rank, on measurements or on random numbers"
            )
    hops = [_hops(shapes, message, replica, call.training) for replica, message in enumerate(messages)]
    return Agreement(plan, hops[mesh.edge_replica])


def _edge_leaders(mesh: Mesh) -> list[int]:
    """Ranks of the topology, by replica."""
    return [mesh.edge_leader(replica) for replica in range(mesh.topology.edge_dp)]


def _exchange(mesh: Mesh, shapes: ShapeBook, plans: PlanBook, call: Call) -> list[dict[str, Any]]:
    """The messages of all edge leaders, by replica."""
    own: dict[str, Any] | None = None
    error: Exception | None = None
    if mesh.is_edge:
        try:
            if isinstance(call.microbatches, Exception):
                raise call.microbatches
            assert call.microbatches is not None
            own = _describe(shapes, plans, call, call.microbatches)
        except Exception as caught:
            error, own = caught, {"error": mesh.tell(caught), "error_type": type(caught).__name__}
    leaders = _edge_leaders(mesh)
    messages = [mesh.control.broadcast(own, leader, patient=True) for leader in leaders]
    for leader, message in zip(leaders, messages, strict=True):
        if "error" in message:
            raise Refusal(error or _called_off(mesh.ranks[leader], call.mode, message))
    if error is not None:  # of a member alone: the leaders are about to go on
        raise error
    if own is not None and own != messages[mesh.edge_replica]:
        raise LdtError(
            "the ranks of the edge must be given equal microbatches and plans, under the same autocast and with the "
            "same modules in train mode: this rank's differ from its leader's in number, shape, dtype, plan or mode"
        )
    return messages


def _called_off(rank: int, mode: Mode, message: dict[str, Any]) -> RemoteStageError:
    return RemoteStageError(
        f"rank {rank}, the edge, called {mode}() off: {message['error']}",
        rank=rank,
        stage=0,
        place=f"the beginning of {mode}()",
        error_type=message["error_type"],
    )


def _describe(
    shapes: ShapeBook, plans: PlanBook, call: Call, microbatches: Sequence[Microbatch]
) -> dict[str, Any]:
    """The step message: only what the head's outputs look like leaves the edge."""
    numbers: dict[HopSpecs, int] = {}
    setting = shapes.setting()
    heads = [shapes.head_output(m.signature, m.args, m.kwargs, call.training, setting) for m in microbatches]
    indices = [numbers.setdefault(head, len(numbers)) for head in heads]
    return {
        "mode": call.mode,
        "serial": call.serial,
        "plan": plans.digest(len(microbatches), call.training),
        "setting": setting,
        "autocast": shapes.autocast(),
        "specs": [[spec.to_json() for spec in head] for head in numbers],
        "microbatches": indices,
    }


def _hops(shapes: ShapeBook, message: dict[str, Any], replica: int, training: bool) -> list[list[HopSpecs]]:
    firsts = [tuple(map(TensorSpec.from_json, head)) for head in message["specs"]]
    chains = [shapes.hops(first, replica, training, message["setting"]) for first in firsts]
    return [chains[index] for index in message["microbatches"]]
