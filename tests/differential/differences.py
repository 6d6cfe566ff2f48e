"""Where the values of a rank differ from the unsplit model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from differential.spec import Job

__all__ = ["differences", "is_exact"]

_RTOL, _ATOL = 1e-8, 1e-11  # of float64, where a sum may be in another order
_MORE_OUTPUTS = ("Emit", "Branch", "EmitOwn", "KeptOutput", "MovedWeight")


def is_exact(job: Job) -> bool:
    """Whether all sums are in the unsplit model's order."""
    more = sum(item.kind in _MORE_OUTPUTS for chunk in job.chunks for item in chunk)
    reduces = job.reduction == "token" or job.dp > 1
    return not (job.ties or reduces or job.clips or more > 1 or job.has("Alias", "Parallel"))


def differences(job: Job, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """A line for each value that is not the unsplit model's."""
    exact = is_exact(job)
    mine, theirs = _compared(job, mine), _compared(job, theirs)
    lines = [f"{name}: there is none" for name in theirs.keys() - mine.keys()]
    lines += [f"{name}: the unsplit model has none" for name in mine.keys() - theirs.keys()]
    pairs = [(name, mine[name], theirs[name]) for name in mine if name in theirs]
    return lines + [f"{name}: {line}" for name, got, want in pairs if (line := _difference(got, want, exact))]


def _compared(job: Job, record: Mapping[str, Any]) -> dict[str, Any]:
    """A rank without gradients gives the norm in float32.

    Backwards count twice where a split one runs them twice, and where a hop carries what may require a gradient: that
    of zeros runs, too.
    """
    in_doubt = job.plan == "split" or job.has("OddDetach", "LayerDrop")
    other = in_doubt and job.has("Custom", "TensorHook", "ModuleHook")
    return {
        name: value.float() if name == "norm" else value
        for name, value in record.items()
        if not (other and name.endswith(" counted"))
    }


def _difference(got: Any, want: Any, exact: bool) -> str:
    if got is None or want is None:
        return "" if got is want else f"{_brief(got)}, the unsplit model has {_brief(want)}"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{_brief(got)}, the unsplit model has {_brief(want)}"
    if exact:
        same = torch.equal(torch.nan_to_num(got), torch.nan_to_num(want))
    else:
        rtol = max(_RTOL, 4 * torch.finfo(got.dtype).eps) if got.is_floating_point() else 0.0
        same = torch.allclose(got, want, rtol=rtol, atol=_ATOL, equal_nan=True)
    return "" if same else f"{_brief(got)}, the unsplit model has {_brief(want)}"


def _brief(value: Any) -> str:
    if value is None:
        return "None"
    numbers = [] if value.is_complex() else value.double().flatten()[:4].tolist()
    return f"{value.dtype} {list(value.shape)} {[round(number, 6) for number in numbers]}"
