"""The Trainer of transformers, with ldt.Leader in place of forward, backward, clipping and update."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
import transformers

from ldt.integrations.hf.chunks import Chunk
from ldt.integrations.hf.trainer.checkpoints import CheckpointsMixin
from ldt.integrations.hf.trainer.edge_model import EdgeModel
from ldt.integrations.hf.trainer.evaluation import EvaluationMixin, Inputs
from ldt.integrations.hf.trainer.one_process import single_process
from ldt.integrations.hf.trainer.optimizers import SteppedByLeader
from ldt.integrations.hf.trainer.refusals import refuse
from ldt.runtime.common.redact import InputTypeError, InputValueError
from ldt.runtime.pipeline import Pipeline
from ldt.runtime.step.call import all_agree
from ldt.train import Leader

__all__ = ["Trainer", "TrainerMixin"]

_REPLACED = (  # what the loop of transformers.Trainer calls, of which some is private
    "_build_accelerator_args",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "get_batch_samples",
    "prediction_step",
    "training_step",
)
_missing = [name for name in _REPLACED if not hasattr(transformers.Trainer, name)]
if _missing:
    raise ImportError(
        f"hf.Trainer replaces {', '.join(_missing)} of transformers.Trainer, which transformers "
        f"{transformers.__version__} does not have: install the version that ldt-torch[trainer] names"
    )


class TrainerMixin(CheckpointsMixin, EvaluationMixin):
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
        self.leader.require_learning_rate()
        self.model.follow(self.leader)

    def _set_up(self, pipeline: Pipeline, args: Any, *others: Any, **options: Any) -> torch.optim.Optimizer:
        if not isinstance(args, transformers.TrainingArguments):
            raise InputTypeError(f"args must be TrainingArguments, got {type(args).__name__}")
        refuse(pipeline, args, options, type(self), TrainerMixin.compute_loss)
        chunks = [chunk for chunk in pipeline.chunks if isinstance(chunk, Chunk)]
        with single_process(args, pipeline.mesh.device) as own_args:
            super().__init__(EdgeModel(chunks), own_args, *others, **options)
        if self.args is not own_args:
            raise InputTypeError(
                f"{type(self).__name__} needs arguments of another class, such as trl.SFTConfig"
            )
        if getattr(self, "aux_loss_enabled", False):
            raise InputValueError(
                "no stage has the routers of all layers, which their auxiliary loss needs: give "
                "router_aux_loss_coef=0.0"
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or self.accelerator.num_processes != 1:
            raise InputValueError(
                "accelerate must have one process without FSDP and DeepSpeed on the edge: start it without "
                "accelerate launch"
            )
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
        with self.autocast():
            result = self.leader.step(
                list(map(self.microbatch, batches)),
                max_norm=self.args.max_grad_norm or math.inf,
                loss_kwargs={"num_items_in_batch": num_items_in_batch},
            )
        if scaler is not None:
            self.optimizer.skipped(scaler.get_scale() < scale)
        self.remember_metrics(result)
        self._grad_norm = result.grad_norm
        assert result.losses is not None
        return result.losses

    def _clip_grad_norm(self, model: Any) -> torch.Tensor | None:
        """The norm of all gradients, which ``Leader.step`` has clipped."""
        return self._grad_norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        return None if self._grad_norm is None else float(self._grad_norm)

    def compute_loss(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the pipeline computes the loss: give Pipeline() a loss_fn")

    # -- what transformers would set up for a whole model -----------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> SteppedByLeader:
        """Wrap the optimizer: the Trainer may look at it, and must not step it."""
        if not isinstance(self.optimizer, SteppedByLeader):
            self.optimizer = SteppedByLeader(super().create_optimizer(model))
        return self.optimizer

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        """``Leader.step`` runs under autocast, with the pipeline's grad scaler: accelerate does neither."""
        return {**super()._build_accelerator_args(**options), "mixed_precision": "no"}

    def push_to_hub(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            "the edge has only its part of the weights: merge a checkpoint and upload that"
        )

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
