"""Describes a call of step() or eval(), and makes all ranks agree to begin a collective call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from ldt.errors import CheckpointError, LdtError, RemoteStageError
from ldt.runtime.common.error_text import safe_isinstance, type_name
from ldt.runtime.common.peer_messages import as_str_dict, as_str_list, plain
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.step.microbatch import Microbatch

__all__ = ["Call", "Mode", "StepRejected", "all_agree"]

Mode = Literal["step", "eval"]
_PHASES = {"begin": "beginning", "finish": "end"}


class StepRejected(Exception):  # noqa: N818 (carries the error to raise)
    """The step was called off on all ranks before anything was sent; the mesh stays usable. Raise ``error``."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


@dataclass(frozen=True)
class Call:
    """One call of step() or eval() on this rank, the ``serial``-th of its pipeline.

    ``microbatches`` are this rank's on the edge and None elsewhere. ``error`` is why this rank cannot make the call;
    the edge's leaders broadcast theirs. ``pipeline`` is the pipeline's number in the mesh. ``command`` is what
    ranks that follow the edge do.
    """

    mode: Mode
    serial: int
    microbatches: list[Microbatch] | None = None
    pipeline: int = 0
    error: Exception | None = None
    command: bytes = b""

    @property
    def number(self) -> int:
        """The number of the call, unique over all pipelines of the mesh."""
        return self.pipeline << 32 | self.serial

    @property
    def training(self) -> bool:
        return self.mode == "step"


def all_agree(
    mesh: Mesh,
    call: str,
    error: Exception | None,
    same: Mapping[str, str],
    payload: object = None,
    read_payload: Callable[[Any], Any] = lambda payload: payload,
    *,
    phase: Literal["begin", "finish"] = "begin",
) -> list[Any]:
    """Raise on every rank if one rank has an ``error``, or if values that must be equal differ. A collective call.

    ``call`` names the call in texts, ``phase`` says whether ranks begin or finish it, and ``error`` is why this rank
    cannot. ``same`` has the values that must be equal, by their name in texts. Returns each rank's ``payload``, as
    ``read_payload`` parses it.

    Other ranks raise RemoteStageError, or CheckpointError if ``error`` is one. Every rank raises LdtError if values of
    ``same`` differ.
    """
    local = {
        "error": None if error is None else mesh.shareable_text(error),
        "error_type": None if error is None else type_name(error),
        "of_checkpoint": error is not None and safe_isinstance(error, CheckpointError),
        "same": dict(same),
        "payload": payload,
    }
    with mesh.collective(call):
        gathered = mesh.control.all_gather(local, partial(_parse_report, read_payload))
        reports = dict(zip(mesh.ranks, gathered, strict=True))
    if error is not None:
        raise error
    for rank, report in reports.items():
        if report.error is not None:
            stage = mesh.rank_info.stage_of(rank)
            if report.of_checkpoint:
                raise CheckpointError(f"rank {rank} (stage {stage}) cannot {phase} {call}: {report.error}")
            raise RemoteStageError(
                f"rank {rank} cannot {phase} {call}: {report.error}",
                rank=rank,
                stage=stage,
                place=f"the {_PHASES[phase]} of {call}",
                error_type=report.error_type,
            )
    for what, value in same.items():
        others = [rank for rank, report in reports.items() if report.same.get(what) != value]
        if others:
            raise LdtError(f"all ranks must be given equal {what}: ranks {others} differ from this rank")
    return [report.payload for report in reports.values()]


class _RankReport(NamedTuple):
    """What one rank reports in ``all_agree``."""

    error: str | None
    error_type: str | None
    of_checkpoint: bool
    same: dict[str, str]
    payload: Any


def _parse_report(read_payload: Callable[[Any], Any], value: Any) -> _RankReport:
    error_texts = [value[name] for name in ("error", "error_type")]
    error, error_type = (None if text is None else plain(as_str_list([text])[0]) for text in error_texts)
    payload, same = read_payload(value["payload"]), as_str_dict(value["same"])
    return _RankReport(error, error_type, value["of_checkpoint"] is True, same, payload)
