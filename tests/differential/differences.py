"""Finds values of a rank that differ from the unsplit model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from differential.spec import Job

__all__ = ["differences", "is_exact"]

_RTOL, _ATOL = 1e-8, 1e-11  # for float64 sums in another order
_MORE_OUTPUTS = ("Emit", "Branch", "EmitOwn", "KeptOutput", "MovedWeight")


def is_exact(job: Job) -> bool:
    """Whether all sums are computed in the unsplit model's order."""
    more = sum(item.kind in _MORE_OUTPUTS for chunk in job.chunks for item in chunk)
    reduces = job.reduction == "token" or job.dp > 1
    return not (job.ties or reduces or job.clips or more > 1 or job.has("Alias", "Parallel"))


def differences(job: Job, actual: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    """Return a line for each value that differs from the unsplit model's."""
    exact = is_exact(job)
    actual, reference = _compared(job, actual), _compared(job, reference)
    lines = [f"{name}: there is none" for name in reference.keys() - actual.keys()]
    lines += [f"{name}: the unsplit model has none" for name in actual.keys() - reference.keys()]
    pairs = [(name, actual[name], reference[name]) for name in actual if name in reference]
    return lines + [f"{name}: {line}" for name, got, want in pairs if (line := _difference(got, want, exact))]


def _compared(job: Job, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values to compare. A rank without gradients has the norm in float32.

    Backwards count twice if a split backward runs them twice, and if a hop carries a tensor that may require a
    gradient: the backward of zeros runs, too.
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
