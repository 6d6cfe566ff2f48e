"""Calls that all ranks make together: what one of step() or eval() is, and how ranks find that they all may begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from ldt.errors import CheckpointError, LdtError, RemoteStageError
from ldt.runtime.common.error_text import safe_isinstance, type_name
from ldt.runtime.common.untrusted import as_str_dict, as_str_list, plain
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.step.microbatch import Microbatch

__all__ = ["Call", "Mode", "StepRejected", "all_agree"]

Mode = Literal["step", "eval"]
_MOMENTS = {"begin": "beginning", "finish": "end"}


class StepRejected(Exception):  # noqa: N818 (a verdict, not an error of its own)
    """The step was called off on all ranks, nothing was sent; the mesh stays usable. ``error`` is to be raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
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


def all_agree(
    mesh: Mesh,
    call: str,
    error: Exception | None,
    same: Mapping[str, str],
    own: object = None,
    read_own: Callable[[Any], Any] = lambda own: own,
    *,
    doing: Literal["begin", "finish"] = "begin",
) -> list[Any]:
    """Raise on every rank if one cannot begin (or finish) ``call`` for an ``error``, or was given other values.

    A collective call. The others raise RemoteStageError, or CheckpointError where that is what the one raises. ``same``
    has what must be equal, by the name it has in texts. Returns each rank's ``own``, as ``read_own`` reads it.
    """
    mine = {
        "error": None if error is None else mesh.shareable_text(error),
        "error_type": None if error is None else type_name(error),
        "of_checkpoint": error is not None and safe_isinstance(error, CheckpointError),
        "same": dict(same),
        "own": own,
    }
    with mesh.collective(call):
        gathered = mesh.control.all_gather(mine, partial(_answer, read_own))
        answers = dict(zip(mesh.ranks, gathered, strict=True))
    if error is not None:
        raise error
    for rank, answer in answers.items():
        if answer.error is not None:
            stage = mesh.rank_info.stage_of(rank)
            if answer.of_checkpoint:
                raise CheckpointError(f"rank {rank} (stage {stage}) cannot {doing} {call}: {answer.error}")
            raise RemoteStageError(
                f"rank {rank} cannot {doing} {call}: {answer.error}",
                rank=rank,
                stage=stage,
                place=f"the {_MOMENTS[doing]} of {call}",
                error_type=answer.error_type,
            )
    for what, value in same.items():
        others = [rank for rank, answer in answers.items() if answer.same.get(what) != value]
        if others:
            raise LdtError(
                f"every rank must be given the same: ranks {others} have other {what} than this rank"
            )
    return [answer.own for answer in answers.values()]


class _Answer(NamedTuple):
    """Of one rank, in ``all_agree``."""

    error: str | None
    error_type: str | None
    of_checkpoint: bool
    same: dict[str, str]
    own: Any


def _answer(read_own: Callable[[Any], Any], value: Any) -> _Answer:
    told = [value[name] for name in ("error", "error_type")]
    error, error_type = (None if text is None else plain(as_str_list([text])[0]) for text in told)
    own, same = read_own(value["own"]), as_str_dict(value["same"])
    return _Answer(error, error_type, value["of_checkpoint"] is True, same, own)
