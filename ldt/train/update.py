"""What happens between two steps, the same on every rank: clipping, optimizer, scheduler, and gradients dropped."""

from __future__ import annotations

import torch

from ldt.errors import LdtError
from ldt.runtime.common.redact import InputTypeError, InputValueError
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
        # Unscaling is a collective call, once per optimizer: also on ranks where everything is frozen.
        self._unscaled = optimizer or torch.optim.SGD([{"params": []}], lr=0.0)
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._scaler = scaler

    @property
    def settings(self) -> dict[str, str]:
        """What must be equal on all ranks."""
        return {"grad scalers": str(self._scaler is not None)}

    def error(self) -> Exception | None:
        """Why the arguments of this rank are wrong."""
        scaler, of_pipeline = self._scaler, self._pipeline.steps.grad_scaler
        if self._pipeline.mesh.is_edge and scaler is not of_pipeline:
            return InputValueError("ldt.Leader must be given the grad scaler of the pipeline, if it has one")
        if scaler is not None and not hasattr(scaler, "over_stages"):
            return InputTypeError(f"scaler must be an ldt.GradScaler, got {type(scaler).__name__}")
        trained = any(parameter.requires_grad for parameter in self._pipeline.parameters())
        if trained and self.optimizer is None and (scaler is not None or not self._pipeline.mesh.is_edge):
            return InputValueError(
                "ldt.follow needs an optimizer, as does ldt.Leader under a grad scaler: chunks of "
                "this rank have parameters to train"
            )
        return None

    @property
    def extra(self) -> dict[str, HasState]:
        """What a checkpoint has beside weights and optimizer."""
        found = {"scheduler": self._scheduler, "scaler": self._scaler}
        return {name: state for name, state in found.items() if state is not None}

    @property
    def lr(self) -> tuple[float, ...]:
        """The learning rate of each parameter group, or one if they are equal; empty without an optimizer."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        rates = tuple(float(group["lr"]) for group in groups)
        return rates[:1] if len(set(rates)) == 1 else rates

    def set_lr(self, rates: tuple[float, ...]) -> None:
        """Give each parameter group its learning rate, or all groups the only one.

        Raises LdtError if the optimizer has another number of groups.
        """
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        if len(rates) not in (1, len(groups)):
            raise LdtError(
                f"learning_rate='edge' needs one learning rate of the edge's optimizer, or one for each of the "
                f"{len(groups)} parameter groups of this rank's; got {len(rates)}: give ldt.Leader an optimizer with "
                "the same groups"
            )
        for index, group in enumerate(groups):
            rate = rates[index] if len(rates) > 1 else rates[0]
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def run(self, command: Command) -> torch.Tensor | None:
        """Do what ``command`` says. Returns the norm of the gradients if they were clipped."""
        if not command.update:
            return None
        norm = None
        if self._scaler is not None:
            self._scaler.unscale_(self._unscaled)
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

    def zero_grad(self) -> None:
        """Drop the gradients of all parameters of this rank."""
        for parameter in self._pipeline.parameters():
            parameter.grad = None

    def train(self, mode: bool) -> None:
        for chunk in self._pipeline.chunks:
            chunk.train(mode)
