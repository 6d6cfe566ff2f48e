"""The Trainer of transformers, with ldt.Leader in place of forward, backward, clipping and update."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers

from ldt.integrations.hf.chunks import Chunk
from ldt.integrations.hf.trainer.checkpoints import CheckpointsMixin
from ldt.integrations.hf.trainer.edge_model import EdgeModel
from ldt.integrations.hf.trainer.one_process import single_process
from ldt.integrations.hf.trainer.optimizers import SteppedByLeader
from ldt.integrations.hf.trainer.refusals import refuse
from ldt.runtime.common.redact import InputTypeError
from ldt.runtime.pipeline import Pipeline
from ldt.runtime.step.call import all_agree
from ldt.train import Leader

__all__ = ["Trainer", "TrainerMixin"]

Inputs = Mapping[str, Any]


class TrainerMixin(CheckpointsMixin):
    """Makes a Trainer of transformers, or one derived from it, train a pipeline. Put it first among the bases.

    See ``Trainer``.
    """

    optimizer: Any

    def __init__(self, pipeline: Pipeline, args: Any, *others: Any, **options: Any) -> None:
        self.pipeline = pipeline
        self._samples: list[Inputs] = []
        self._losses: deque[torch.Tensor] = deque()
        self._grad_norm: torch.Tensor | None = None
        error: Exception | None = None
        optimizer: torch.optim.Optimizer | None = None
        try:
            optimizer = self._set_up(pipeline, args, *others, **options)
        except Exception as caught:
            error = caught
        if error is not None:  # the cloud is in ldt.follow
            all_agree(pipeline.mesh, "ldt.Leader or ldt.follow", error, {})
        self.leader = Leader(pipeline, optimizer, scaler=pipeline.steps.grad_scaler)
        self.model.follow(self.leader)

    def _set_up(self, pipeline: Pipeline, args: Any, *others: Any, **options: Any) -> torch.optim.Optimizer:
        if not isinstance(args, transformers.TrainingArguments):
            raise InputTypeError(f"args must be TrainingArguments, got {type(args).__name__}")
        refuse(pipeline, args, options, type(self), TrainerMixin.compute_loss)
        args = single_process(args, pipeline.mesh.device)
        chunks = [chunk for chunk in pipeline.chunks if isinstance(chunk, Chunk)]
        super().__init__(EdgeModel(chunks), args, *others, **options)
        optimizer: torch.optim.Optimizer = self.create_optimizer().optimizer
        return optimizer

    # -- a step ---------------------------------------------------------------------------------------------------

    def get_batch_samples(self, *given: Any) -> Any:
        """Keep the batches of the next update, which are the microbatches of its step."""
        self._samples, count = super().get_batch_samples(*given)
        self._losses.clear()
        return self._samples, count

    def training_step(self, model: Any, inputs: Inputs, num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the loss of a batch. The first of an update runs the step of all its batches, with the update."""
        model.train()
        if not self._losses:
            self._losses.extend(self._step(self._samples, num_items_in_batch))
        return self._losses.popleft()

    def _step(self, batches: list[Inputs], num_items_in_batch: Any) -> list[torch.Tensor]:
        scaler = self.pipeline.steps.grad_scaler
        scale = 0.0 if scaler is None else scaler.get_scale()
        with self._autocast():
            result = self.leader.step(
                list(map(self._microbatch, batches)),
                max_norm=self.args.max_grad_norm or math.inf,
                loss_kwargs={"num_items_in_batch": num_items_in_batch},
            )
        if scaler is not None:
            self.optimizer.skipped(scaler.get_scale() < scale)
        self._grad_norm = result.grad_norm
        assert result.losses is not None
        return result.losses

    def _clip_grad_norm(self, model: Any) -> torch.Tensor | None:
        """The norm of all gradients, which ``Leader.step`` has clipped."""
        return self._grad_norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        return None if self._grad_norm is None else float(self._grad_norm)

    def prediction_step(
        self, model: Any, inputs: Inputs, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Run forward on all ranks. Returns loss, logits and labels."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        count = self._get_num_items_in_batch([inputs], self.args.device)
        with self._autocast():
            result = self.leader.eval(
                [self._microbatch(inputs)],
                keep_outputs=not prediction_loss_only,
                loss_kwargs={"num_items_in_batch": count},
            )
        if prediction_loss_only:
            return result.loss, None, None
        assert result.outputs is not None
        return result.loss, result.outputs[0].float(), labels

    def compute_loss(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the pipeline computes the loss: give Pipeline() a loss_fn")

    def _microbatch(self, inputs: Inputs) -> tuple[dict[str, Any], Any]:
        given = dict(self._prepare_inputs(inputs))
        labels = given.pop("labels", None)
        return {name: value for name, value in given.items() if value is not None}, labels

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.args.mixed_precision)
        return nullcontext() if dtype is None else torch.autocast(self.pipeline.mesh.device.type, dtype)

    # -- what transformers would set up for a whole model -----------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> SteppedByLeader:
        """Wrap the optimizer: the Trainer may look at it, and must not step it."""
        if not isinstance(self.optimizer, SteppedByLeader):
            self.optimizer = SteppedByLeader(super().create_optimizer(model))
        return self.optimizer

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        """``Leader.step`` runs under autocast, with the pipeline's grad scaler: accelerate does neither."""
        return {**super()._build_accelerator_args(**options), "mixed_precision": "no"}

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("each trial needs a pipeline of its own: run trials as jobs")

    def close(self) -> None:
        """End ``ldt.follow`` on the cloud. Idempotent."""
        self.leader.close()

    def end(self) -> None:
        """Close and finish the trackers. The process group stays."""
        self.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self.leader.__exit__(*error)


class Trainer(TrainerMixin, transformers.Trainer):
    """The Trainer of transformers on the edge, for a pipeline of ``ldt.integrations.hf`` chunks.

    Runs on the edge alone, while ranks of the cloud run ``ldt.follow(..., learning_rate="edge")``. The constructor is a
    collective call with that. Batches of ``gradient_accumulation_steps`` are the microbatches of a step. Losses,
    gradient norm and weights are those of ``transformers.Trainer`` for the whole model. A context manager: at the end
    of the block the cloud's ``follow`` returns.

    Args:
        pipeline: The edge's pipeline, with ``loss_fn=hf.causal_lm_loss`` and ``loss_reduction="sum"``.
        args: The ``TrainingArguments``, made after ``ldt.connect``.
        *others: As for ``transformers.Trainer``.
        **options: As for ``transformers.Trainer``, such as ``train_dataset`` and ``callbacks``.

    Raises:
        ValueError: Names arguments that cannot be right for a split model. Raised on the edge; the cloud raises
            RemoteStageError.
        LdtError: As ``ldt.Leader``.
    """
