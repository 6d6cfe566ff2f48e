"""The training recipe: optimizer and learning rate. Independent of pipelines."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

__all__ = ["MAX_NORM", "Recipe"]

MAX_NORM = 1.0  # of all gradients together
WARM_UP = 0.05  # share of the steps
LOWEST = 0.1  # learning rate of the last step, as a share of the highest


class Recipe:
    """AdamW whose learning rate rises in a warm-up and then falls along a cosine."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float, steps: int) -> None:
        by_kind: dict[bool, list[torch.nn.Parameter]] = {}
        for parameter in parameters:  # the fused kernel takes either plain tensors or DTensors
            by_kind.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        groups = [{"params": same} for same in by_kind.values()]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self._steps = steps
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._factor)

    def update(self) -> None:
        """Update the weights and clear the gradients."""
        self.optimizer.step()
        self._schedule.step()
        self.optimizer.zero_grad()

    @property
    def extra(self) -> dict[str, torch.optim.lr_scheduler.LambdaLR]:
        """What a checkpoint saves beside the optimizer."""
        return {"schedule": self._schedule}

    def _factor(self, step: int) -> float:
        rising = (step + 1) / (WARM_UP * self._steps)
        falling = 0.5 * (1 + math.cos(math.pi * step / self._steps))
        return min(1.0, rising) * (LOWEST + (1 - LOWEST) * falling)
