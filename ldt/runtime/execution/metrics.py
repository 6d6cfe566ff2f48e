"""What a loss function returns beside the loss: metrics of a microbatch, by name."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from ldt.runtime.common.redact import InputTypeError

__all__ = ["split_metrics"]


def split_metrics(result: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split the metrics, a dict in the last place of a tuple, from what a loss function returns.

    Metrics are detached and copied, so that they keep neither a graph nor the memory of logits. Numbers become tensors
    of the CPU. Raises TypeError for a name that is no string and a value that is neither a tensor nor a number.
    """
    if not (isinstance(result, (tuple, list)) and len(result) > 1 and isinstance(result[-1], dict)):
        return result, {}
    *rest, found = result
    metrics = {}
    for index, (name, value) in enumerate(found.items()):
        if not isinstance(name, str):
            raise InputTypeError(f"loss_fn must name its metrics by strings, got {type(name).__name__}")
        if not isinstance(value, (torch.Tensor, Real)):
            raise InputTypeError(
                f"loss_fn must return tensors or numbers as metrics, got {type(value).__name__} as number {index}"
            )
        metrics[name] = value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(value)
    return rest[0] if len(rest) == 1 else tuple(rest), metrics
