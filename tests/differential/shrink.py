"""Shrinks a job while it still gives the same finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from differential.compare import Verdict
from differential.spec import Call, Job

__all__ = ["shrink"]

_TRIES = 120
_PLAIN: dict[str, Any] = {
    "slow": False,
    "clips": False,
    "scales": False,
    "autocasts": False,
    "inputs": "tensor",
    "shares_buffers": True,
    "wraps": False,
    "names": False,
    "torn": "",
    "frozen": (),
    "ties": (),
    "begin": "equal",
    "loss": "Squares",
    "plan": "ushape",
    "reduction": "mean",
    "optimizer": "sgd",
    "lanes": "dedicated",
    "transfer": "leader",
}


def shrink(job: Job, verdict: Verdict, run: Callable[[Job], Verdict]) -> tuple[Job, Verdict]:
    """Return the smallest job found, and its verdict: removes one thing at a time while it fails alike."""
    candidates = _smaller(job)
    for _ in range(_TRIES):
        candidate = next(candidates, None)
        if candidate is None:
            break
        found = run(candidate)
        if found.is_finding and found.family == verdict.family:
            job, verdict, candidates = candidate, found, _smaller(candidate)
    return job, verdict


def _smaller(job: Job) -> Iterator[Job]:
    """Yield jobs with one thing less, the largest reductions first."""
    yield from _smaller_meshes(job)
    for name, plain in _PLAIN.items():
        if getattr(job, name) != plain:
            yield replace(job, **{name: plain})
    for index in reversed(range(len(job.calls))):
        if _is_sound(rest := job.calls[:index] + job.calls[index + 1 :]):
            yield replace(job, calls=rest)
    for index, chunk in enumerate(job.chunks):
        for position in range(len(chunk)):
            yield _with(job, "chunks", index, chunk[:position] + chunk[position + 1 :])
    for index, call in enumerate(job.calls):
        yield from (_with(job, "calls", index, less) for less in _smaller_calls(call))


def _smaller_meshes(job: Job) -> Iterator[Job]:
    shapes: list[dict[str, Any]] = [
        {"tp": (1,) * len(job.tp), "transfer": "leader"},
        {"dp": 1, "edge_dp": 1},
        {"laps": 1},
        {"tp": job.tp[:-1]},
        {"tp": job.tp[1:]},
    ]
    for shape in shapes:
        if any(getattr(job, name) != value for name, value in shape.items()) and shape.get("tp", (1,)):
            smaller = replace(job, **shape, frozen=(), ties=())
            if len(smaller.tp) > 1 or smaller.dp == smaller.edge_dp:
                yield replace(smaller, chunks=_fewer(job.chunks, smaller.topology.num_chunks))


def _fewer(chunks: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    """Merge the last chunks: the same parts in fewer chunks."""
    return (*chunks[: number - 1], sum(chunks[number - 1 :], ()))


def _smaller_calls(call: Call) -> Iterator[Call]:
    if call.overflows:
        yield replace(call, overflows=False)
    if call.quiet:
        yield replace(call, quiet=False)
    if call.ahead:
        yield replace(call, ahead=False)
    if len(call.batches) > 1:
        yield replace(call, batches=call.batches[:-1])
    if set(call.batches) - {1}:
        yield replace(call, batches=(1,) * len(call.batches))


def _is_sound(calls: tuple[Call, ...]) -> bool:
    """Whether every load has a save before it, and every announced step exists."""
    kinds = [call.kind for call in calls]
    loads = [kinds.index(kind) for kind in ("load", "restart") if kind in kinds]
    saved = kinds.index("save") if "save" in kinds else len(kinds)
    announced = all(kinds[at + 1 : at + 2] == ["step"] for at, call in enumerate(calls) if call.ahead)
    return bool(calls) and announced and all(saved < load for load in loads)


def _with(job: Job, name: str, index: int, value: Any) -> Job:
    """Return the job with another entry in one of its tuples."""
    entries = list(getattr(job, name))
    entries[index] = value
    return replace(job, **{name: tuple(entries)})
