"""The optimizer that TrainingArguments describe, and what the Trainer sees of it once ldt.Leader steps it."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from transformers import TrainingArguments

from ldt.integrations.hf.optimizer import parameter_groups
from ldt.runtime.pipeline import Pipeline

__all__ = ["SteppedByLeader", "create_optimizer"]


def create_optimizer(pipeline: Pipeline, args: TrainingArguments) -> torch.optim.Optimizer:
    """Return the optimizer of this rank's chunks that ``transformers.Trainer`` would make for the whole model.

    For ranks of the cloud, with the arguments that the edge's Trainer has.
    """
    kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
    optimizer: torch.optim.Optimizer = kind(parameter_groups(pipeline.chunks, args.weight_decay), **options)
    return optimizer


class SteppedByLeader(AcceleratedOptimizer):  # type: ignore[misc]  # no type information
    """The edge's optimizer for the Trainer. ``ldt.Leader.step`` has stepped it and dropped the gradients."""

    _is_accelerate_prepared = True  # accelerate need not wrap it

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False)

    def step(self, closure: Any = None) -> None:
        """Do nothing."""

    def skipped(self, skipped: bool) -> None:
        """Tell the Trainer whether the last step was skipped for gradients that overflowed."""
        self._is_overflow = skipped
