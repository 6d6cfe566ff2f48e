"""A LightningModule that trains a pipeline through ldt.Leader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning
import torch
from lightning.fabric.utilities import rank_zero

from ldt.runtime.common.redact import InputValueError
from ldt.runtime.execution.step_result import StepResult
from ldt.runtime.pipeline import Pipeline
from ldt.train import Leader

__all__ = ["PipelineModule"]

_STEP = "ldt_step"  # in Lightning's checkpoints: the step of ldt's
_ALL = 10**6


class PipelineModule(lightning.LightningModule):
    """Trains a pipeline with a Lightning Trainer on the edge.

    Ranks of the cloud run ``ldt.follow(..., learning_rate="edge")``; the constructor is a collective call with that. A
    batch of a data loader is a list of microbatches. Derive from it to change ``microbatches`` or what is logged.
    A context manager: at the end of the block the cloud's ``follow`` returns.

    ``training_step`` runs forward, backward, clipping and the update on all ranks, so Lightning's own backward and
    optimizer step do nothing. Lightning steps the scheduler.

    Args:
        pipeline: The edge's pipeline.
        optimizer: The optimizer of its parameters.
        scheduler: A scheduler, or a dict, as ``configure_optimizers`` returns it.
        checkpoints: Folder for the edge's part of checkpoints. Needed to save and load; the cloud's is that of
            ``ldt.follow``.
        keep: How many of these are kept; None keeps all.

    Raises:
        LdtError: As ``ldt.Leader``.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        checkpoints: str | os.PathLike[str] | None = None,
        keep: int | None = None,
    ) -> None:
        super().__init__()
        self.pipeline = pipeline
        self._optimizer, self._scheduler = optimizer, scheduler
        self._checkpoints = None if checkpoints is None else Path(checkpoints)
        self._keep, self._saved = keep or _ALL, -1
        self.leader = Leader(pipeline, optimizer)
        self.leader.require_learning_rate()
        self.leader.train(True)

    def microbatches(self, batch: Any) -> Any:
        """Return the microbatches of a batch of the data loader, which is such a list unless you override this."""
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        """Run a step on all ranks, with the update. Logs the loss, metrics of the loss function, and the norm."""
        max_norm = self.trainer.gradient_clip_val
        result = self.leader.step(self.microbatches(batch), max_norm=max_norm or None)
        self._log("train", result)
        if result.grad_norm is not None:
            self.log("grad_norm", result.grad_norm)
        return result.loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        """Run forward on all ranks. Logs as ``training_step``."""
        return self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        """Run forward on all ranks. Logs as ``training_step``."""
        return self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> list[Any] | None:
        """Return the outputs of the microbatches."""
        return self.leader.eval(self.microbatches(batch)).outputs

    def _evaluate(self, kind: str, batch: Any) -> torch.Tensor | None:
        result = self.leader.eval(self.microbatches(batch), keep_outputs=False)
        self._log(kind, result)
        return result.loss

    def _log(self, kind: str, result: StepResult) -> None:
        means = {
            name: torch.stack([value.float().mean() for value in values]).mean()
            for name, values in result.metrics.items()
        }
        for name, value in {"loss": result.loss, **means}.items():
            if value is not None:
                self.log(
                    f"{kind}_{name}", value, prog_bar=name == "loss", batch_size=len(result.losses or [0])
                )

    def close(self) -> None:
        """End ``ldt.follow`` on the cloud. Idempotent."""
        self.leader.close()

    def __enter__(self) -> PipelineModule:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leader.__exit__(kind, error, trace)

    # -- hooks that Lightning calls --------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Raise ValueError naming settings of the Trainer that cannot be right."""
        found = [text for text, is_wrong in self._refused(self.trainer) if is_wrong]
        if found:
            raise InputValueError("a PipelineModule does not support " + "; ".join(found))

    def _refused(self, trainer: Any) -> Iterator[tuple[str, bool]]:
        device, root = self.pipeline.mesh.device, trainer.strategy.root_device
        number, precision, world = trainer.accumulate_grad_batches, trainer.precision, trainer.world_size
        clip = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)
        rank = getattr(rank_zero.rank_zero_only, "rank", 0)
        yield f"accumulate_grad_batches={number} (a batch is a list of microbatches)", number != 1
        yield f"gradient_clip_algorithm={str(clip)!r} (use 'norm')", clip not in (None, "norm")
        yield (
            f"precision={precision!r} (use 32-true or bf16-mixed)",
            precision not in ("32-true", "bf16-mixed"),
        )
        yield f"{world} processes (use devices=1: the cloud follows)", world != 1
        yield f"an edge of rank {rank} (Lightning logs and saves on rank 0)", rank != 0
        yield f"the device {root} (the mesh has {device})", root != device

    def configure_optimizers(self) -> Any:
        """The optimizer and scheduler that the module was given."""
        return self._optimizer if self._scheduler is None else ([self._optimizer], [self._scheduler])

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Run ``training_step``, which updates weights."""
        optimizer_closure()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``training_step`` ran it."""

    def train(self, mode: bool = True) -> PipelineModule:
        """Switch the chunks of all ranks, if they are in the other mode."""
        if self.training != mode and "leader" in self.__dict__:
            self.leader.train(mode)
        return super().train(mode)

    def on_validation_model_train(self) -> None:
        self.train()

    def on_test_model_train(self) -> None:
        self.train()

    def on_predict_model_train(self) -> None:
        self.train()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save all stages as the current step, once."""
        step = self.trainer.global_step
        if step != self._saved:
            self.leader.save(self._folder, step=step, keep=self._keep)
            self._saved = step
        checkpoint[_STEP] = step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load all stages."""
        self.leader.load(self._folder, step=checkpoint[_STEP])

    @property
    def _folder(self) -> Path:
        if self._checkpoints is None:
            raise InputValueError(
                "this PipelineModule needs checkpoints=, a folder of this site, to save and load"
            )
        return self._checkpoints
