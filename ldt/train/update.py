"""What happens between two steps, the same on every rank: clipping, optimizer, scheduler, and gradients dropped."""

from __future__ import annotations

import torch

from ldt.runtime.control.command import Command
from ldt.runtime.pipeline import Pipeline
from ldt.train.checkpoint.save import HasState
from ldt.train.grad_norm import clip_grad_norm_

__all__ = ["Updater"]


class Updater:
    """The optimizer, scheduler and grad scaler of this rank."""

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        scheduler: HasState | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.optimizer = optimizer
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._scaler = scaler

    @property
    def settings(self) -> dict[str, str]:
        """What must be equal on all ranks. Unscaling is a collective call, once per optimizer."""
        scaled = self._scaler is not None
        unscales = scaled and self.optimizer is not None
        return {"grad scalers": str(scaled), "optimizers under a grad scaler": str(unscales)}

    @property
    def extra(self) -> dict[str, HasState]:
        """What a checkpoint has beside weights and optimizer."""
        found = {"scheduler": self._scheduler, "scaler": self._scaler}
        return {name: state for name, state in found.items() if state is not None}

    def run(self, command: Command) -> torch.Tensor | None:
        """Do what ``command`` says. Returns the norm of the gradients if they were clipped."""
        if not command.update:
            return None
        norm = None
        if self._scaler is not None and self.optimizer is not None:
            self._scaler.unscale_(self.optimizer)
        if command.max_norm is not None:
            limit, kind = float(command.max_norm), float(command.norm_type)
            norm = clip_grad_norm_(self._pipeline.parameters(), limit, self._pipeline.mesh, kind)
        if self.optimizer is not None:
            self.optimizer.step() if self._scaler is None else self._scaler.step(self.optimizer)
        if self._scaler is not None:
            self._scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()  # type: ignore[attr-defined]
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        return norm

    def train(self, mode: bool) -> None:
        for chunk in self._pipeline.chunks:
            chunk.train(mode)
