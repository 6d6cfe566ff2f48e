"""Calls that all ranks make together: what one of step() or eval() is, and how ranks find that they all may begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ldt.errors import LdtError, RemoteStageError
from ldt.runtime.mesh import Mesh
from ldt.runtime.microbatch import Microbatch

__all__ = ["Call", "Mode", "Refusal", "agree"]

Mode = Literal["step", "eval"]
_MOMENTS = {"begin": "beginning", "finish": "end"}


class Refusal(Exception):  # noqa: N818 (a verdict, not an error of its own)
    """The step was called off on all ranks, nothing was sent; the mesh stays usable. ``error`` is to be raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class Call:
    """One call of step() or eval() on this rank, the ``serial``-th of its pipeline.

    On the edge ``microbatches`` are this rank's; anywhere they may be the reason why the call cannot be made, which
    the edge's leaders pass on. ``pipeline`` is its number among those of the mesh.
    """

    mode: Mode
    serial: int
    microbatches: Sequence[Microbatch] | Exception | None
    pipeline: int = 0

    @property
    def number(self) -> int:
        """Of the call among those of all pipelines of the mesh."""
        return self.pipeline << 32 | self.serial

    @property
    def reason(self) -> Exception | None:
        """Why the call cannot be made, as far as this rank knows."""
        return self.microbatches if isinstance(self.microbatches, Exception) else None

    @property
    def training(self) -> bool:
        return self.mode == "step"


def agree(
    mesh: Mesh,
    call: str,
    error: Exception | None,
    same: Mapping[str, str],
    own: object = None,
    *,
    doing: Literal["begin", "finish"] = "begin",
) -> list[Any]:
    """Raise on every rank if one cannot begin (or finish) ``call`` for an ``error``, or was given other values.

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
                f"rank {rank} cannot {doing} {call}: {answer['error']}",
                rank=rank,
                stage=mesh.stage_of(rank),
                place=f"the {_MOMENTS[doing]} of {call}",
                error_type=answer["error_type"],
            )
    for what, value in same.items():
        others = [rank for rank, answer in answers.items() if answer["same"][what] != value]
        if others:
            raise LdtError(
                f"every rank must be given the same: ranks {others} have other {what} than this rank"
            )
    return [answer["own"] for answer in answers.values()]
