"""Evaluates several batches of a data loader in one call of the pipeline, so that its stages work at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ldt.runtime.execution.step_result import StepResult
from ldt.runtime.pipeline import Pipeline
from ldt.train import Leader

__all__ = ["EvaluationMixin", "Inputs"]

Inputs = Mapping[str, Any]
_Trainer: Any = object  # a Trainer of transformers comes behind this class


class EvaluationMixin(_Trainer):  # type: ignore[misc]
    """``evaluate`` and ``predict`` of the Trainer, and the metrics of the loss function."""

    pipeline: Pipeline
    leader: Leader

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Loss and logits of batches that the loop has yet to come to.
        self._evaluated: deque[tuple[torch.Tensor | None, Any]] = deque()
        self._of_loss: dict[bool, dict[str, list[torch.Tensor]]] = {True: {}, False: {}}  # by mode

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        *others: Any,
        **options: Any,
    ) -> Any:
        """Run the loop of the Trainer over batches that are evaluated in groups."""
        only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        number = max(self.args.gradient_accumulation_steps, 2 * self.pipeline.mesh.topology.num_stages)
        self._evaluated.clear()
        ahead = _Ahead(dataloader, number, lambda batches: self._evaluate_batches(batches, not only))
        return super().evaluation_loop(ahead, description, prediction_loss_only, *others, **options)

    def prediction_step(
        self, model: Any, inputs: Inputs, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return loss, logits and labels of a batch."""
        if not self._evaluated:
            self._evaluate_batches([inputs], not prediction_loss_only)
        loss, logits = self._evaluated.popleft()
        if prediction_loss_only:
            return loss, None, None
        return loss, logits, self._prepare_inputs(inputs).get("labels")

    def _evaluate_batches(self, batches: Sequence[Inputs], keep_outputs: bool) -> None:
        microbatches = list(map(self.microbatch, batches))
        with self.autocast():
            result = self.leader.eval(microbatches, keep_outputs=keep_outputs)
        self.remember_metrics(result)
        losses, outputs = iter(result.losses or ()), result.outputs or [None] * len(batches)
        for (_, labels), output in zip(microbatches, outputs, strict=True):
            logits = None if output is None else output.float()
            self._evaluated.append((None if labels is None else next(losses), logits))

    def log(self, logs: dict[str, float], *others: Any) -> None:
        """Add the means of the metrics that the loss function has returned since they were last logged."""
        found = self._of_loss[self.model.training]
        prefix = next((name.removesuffix("loss") for name in logs if name.endswith("_loss")), "")
        for name, values in found.items():
            logs[prefix + name] = math.fsum(float(value.float().mean()) for value in values) / len(values)
        found.clear()
        super().log(logs, *others)

    def remember_metrics(self, result: StepResult) -> None:
        """Keep the metrics of a step or an eval for ``log``."""
        for name, values in result.metrics.items():
            self._of_loss[self.model.training].setdefault(name, []).extend(values)

    def microbatch(self, inputs: Inputs) -> tuple[dict[str, Any], Any]:
        """Return what the pipeline takes for a batch: inputs of the model, and labels if there are any."""
        given = dict(self._prepare_inputs(inputs))
        labels = given.pop("labels", None)
        return {name: value for name, value in given.items() if value is not None}, labels

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the pipeline's calls are made; ranks that follow get its dtype."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.args.mixed_precision)
        return nullcontext() if dtype is None else torch.autocast(self.pipeline.mesh.device.type, dtype)


class _Ahead:
    """A data loader whose next ``number`` batches are given to ``evaluate`` before the first of them is yielded.

    It has the attributes of the ``loader``. While it yields a batch, accelerate's mark of the last batch is that of
    this batch.
    """

    def __init__(self, loader: Any, number: int, evaluate: Callable[[list[Inputs]], None]) -> None:
        self._loader, self._number, self._evaluate = loader, number, evaluate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Inputs]:
        batches = iter(self._loader)
        while group := list(self._next(batches)):
            is_end = getattr(self._loader, "end_of_dataloader", None)
            self._evaluate(group)
            for index, batch in enumerate(group):
                if is_end is not None:
                    self._loader.end_of_dataloader = is_end and index == len(group) - 1
                yield batch

    def _next(self, batches: Iterator[Inputs]) -> Iterator[Inputs]:
        """Stop behind the last batch: accelerate forgets the loader once it is asked for another one."""
        for _ in range(self._number):
            batch = next(batches, None)
            if batch is None:
                return
            yield batch
            if getattr(self._loader, "end_of_dataloader", False):
                return
