"""The training loop of the edge: the cloud follows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import get_scheduler

import ldt
from ldt.integrations import hf
from sft.batches import NO_LABEL, Batches, Microbatch
from sft.generate import continued
from sft.options import Options
from sft.progress import Progress
from sft.tokens import Tokenizer

__all__ = ["Training"]


class Training:
    """Trains ``built`` on ``batches``. All ranks of the edge make the same calls; the first of them shows how it goes.

    Args:
        options: Those of the recipe.
        built: This rank's part of the model.
        batches: The samples to train on.
        held_out: Those for evaluation, if there are any.
        tokenizer: Used for continuations of the prompts.
        checkpoints: Folder of this site's checkpoints; None saves none.
    """

    def __init__(
        self,
        options: Options,
        built: hf.Built,
        batches: Batches,
        held_out: Batches | None,
        tokenizer: Tokenizer,
        checkpoints: Path | None,
    ) -> None:
        self._options, self._built = options, built
        self._batches, self._held_out = batches, held_out
        self._tokenizer, self._checkpoints = tokenizer, checkpoints
        self._mesh = built.pipeline.mesh
        self.steps = options.steps or batches.steps(options.epochs, options.microbatches * self._replicas)
        self._scheduler = get_scheduler(
            options.schedule, built.optimizer, math.ceil(options.warm_up * self.steps), self.steps
        )

    @property
    def _replicas(self) -> int:
        return self._mesh.topology.edge_dp

    def run(self) -> None:
        """Train, or go on from the newest checkpoint, and evaluate at the end."""
        options = self._options
        with ldt.Leader(
            self._built.pipeline, self._built.optimizer, self._scheduler, self._built.scaler
        ) as leader:
            start = self._load(leader)
            progress = self._progress(start)
            for step in range(start, self.steps):
                self._step(leader, step, progress)
                done = step + 1
                if done % options.validate_every == 0 or done == self.steps:
                    self._evaluate(leader, done, progress)
                if self._checkpoints is not None and (done % options.save_every == 0 or done == self.steps):
                    leader.save(self._checkpoints, step=done)
            if progress is not None:
                progress.close()

    def _load(self, leader: ldt.Leader) -> int:
        if self._checkpoints is None or not self._options.resume:
            return 0
        loaded = leader.load(self._checkpoints)
        if loaded is not None and self._mesh.rank == 0:
            print(f"goes on from the checkpoint of step {loaded.step} in {self._checkpoints}", flush=True)
        return 0 if loaded is None else loaded.step

    def _progress(self, start: int) -> Progress | None:
        if self._mesh.rank != 0:
            return None
        options = self._options
        folder = options.output / "tensorboard" if options.tensorboard and options.output else None
        per_weight = 6 if options.adapter is None else 4  # no gradients of frozen weights
        return Progress(self.steps, start, per_weight * _parameters(options.model), folder)

    def _step(self, leader: ldt.Leader, step: int, progress: Progress | None) -> None:
        options = self._options
        batch = self._batches.step(step, options.microbatches, self._mesh.replica, self._replicas)
        with self._computing():
            result = leader.step(self._on_device(batch), max_norm=options.max_norm)
        report = (step + 1) % options.report_every == 0
        stats = leader.gather_stats(result) if report else None
        if progress is not None:
            assert result.loss is not None
            assert result.grad_norm is not None
            scalars = {"loss": float(result.loss), "grad_norm": float(result.grad_norm)}
            scalars["lr"] = self._scheduler.get_last_lr()[0]
            tokens = sum(labels.numel() for _, labels in batch) * self._replicas
            progress.step(step + 1, tokens, scalars)
            if stats is not None:
                progress.report(step + 1, ldt.scalars(stats))

    def _evaluate(self, leader: ldt.Leader, step: int, progress: Progress | None) -> None:
        """Compute the loss per token of held-out samples, and continue the prompts."""
        options = self._options
        leader.train(False)
        if self._held_out is not None:
            total, tokens = 0.0, 0
            batch, number = self._held_out.all(), options.microbatches
            for start in range(0, len(batch), number):
                part = batch[start : start + number]
                with self._computing():
                    result = leader.eval(self._on_device(part), keep_outputs=False)
                assert result.loss is not None
                learned = sum(int((labels[:, 1:] != NO_LABEL).sum()) for _, labels in part)
                total, tokens = total + float(result.loss) * learned, tokens + learned
            if progress is not None:
                progress.write(step, {"validation_loss": total / tokens})
                progress.say(f"step {step}: validation loss {total / tokens:.4f}")
        if options.prompts:
            texts = continued(leader, self._tokenizer, options.prompts, options.generate, self._computing())
            for prompt, text in zip(options.prompts, texts, strict=True):
                if progress is not None:
                    progress.say(f"step {step}: {prompt}|{text}")
        leader.train()

    def _computing(self) -> Any:
        autocast = self._options.autocast
        dtype = None if autocast is None else getattr(torch, autocast)
        return torch.autocast(self._mesh.device.type, dtype, enabled=dtype is not None)

    def _on_device(self, batch: Sequence[Microbatch]) -> list[Microbatch]:
        device = self._mesh.device
        return [
            ({name: t.to(device) for name, t in inputs.items()}, labels.to(device))
            for inputs, labels in batch
        ]


def _parameters(model: str) -> int:
    """The number of the model's parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        whole: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))  # type: ignore[no-untyped-call]
    return sum(parameter.numel() for parameter in whole.parameters())
