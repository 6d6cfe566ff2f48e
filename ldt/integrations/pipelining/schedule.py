"""A pipeline as a schedule of ``torch.distributed.pipelining``: whole batches in, losses and merged outputs out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)

from ldt.runtime.common.redact import InputTypeError, InputValueError
from ldt.runtime.execution.step_result import StepResult
from ldt.runtime.pipeline import Pipeline
from ldt.runtime.step.microbatch import Microbatch

__all__ = ["Schedule"]


class _Given(NamedTuple):
    """A call's target, and what it has split itself."""

    target: Any
    arg_mbs: Sequence[Any] | None
    kwarg_mbs: Sequence[Mapping[str, Any]] | None
    target_mbs: Sequence[Any] | None


class Schedule:
    """Calls a pipeline as scripts call the schedules of ``torch.distributed.pipelining``.

    The edge has both the first and the last stage of such a script; cloud ranks call ``step()`` without arguments. The
    pipeline has the loss function: with ``loss_reduction="mean"`` gradients are those of torch's schedules, with
    ``"sum"`` those of ``scale_grads=False``. Its plan takes the place of the order of a schedule class.

    Args:
        pipeline: The pipeline to call.
        n_microbatches: Number of microbatches that a batch is split into.
        args_chunk_spec: How to split each positional argument, as a tuple of ``TensorChunkSpec``. Default: tensors
            along dimension 0, other values go whole to every microbatch.
        kwargs_chunk_spec: The same for keyword arguments, as a dict.
        output_merge_spec: How to merge the outputs of microbatches. Default: tensors along dimension 0.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        n_microbatches: int,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: Any = None,
    ) -> None:
        if n_microbatches < 1:
            raise ValueError(f"n_microbatches must be 1 or more, got {n_microbatches}")
        self.pipeline = pipeline
        self.n_microbatches = n_microbatches
        self._args_chunk_spec = args_chunk_spec
        self._kwargs_chunk_spec = kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of a batch. A collective call; see ``Pipeline.step``, also for what it raises.

        Args:
            *args: Positional arguments of the first chunk, on the edge.
            target: What the loss function takes beside the output.
            losses: A list whose contents become the losses of the microbatches, detached.
            return_outputs: Return the merged outputs of the last chunk.
            loss_kwargs: Keyword arguments of the loss function.
            arg_mbs: Positional arguments of each microbatch, each a tuple or one value, in place of ``args``.
            kwarg_mbs: Keyword arguments of each microbatch, in place of ``kwargs``.
            target_mbs: The target of each microbatch, in place of ``target``.
            **kwargs: Keyword arguments: chunks on the edge get those that they name, chunks on the cloud metadata only.

        Returns:
            The outputs, detached, on the edge with ``return_outputs``; else None.

        Raises:
            TypeError: An argument that has an entry per microbatch is no list, or an entry of ``kwarg_mbs`` no dict.
            ValueError: The batch has fewer samples than ``n_microbatches``, a list has another length, parts of a batch
                were given both whole and split, or a cloud rank was given arguments.
        """
        batch = self._batch(args, kwargs, _Given(target, arg_mbs, kwarg_mbs, target_mbs))
        result = self.pipeline.step(batch, keep_outputs=return_outputs, loss_kwargs=loss_kwargs)
        return self._finish(result, losses)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward only. Arguments and results are those of ``step``; there is no loss without a target."""
        batch = self._batch(args, kwargs, _Given(target, arg_mbs, kwarg_mbs, target_mbs))
        result = self.pipeline.eval(batch, keep_outputs=return_outputs, loss_kwargs=loss_kwargs)
        return self._finish(result, losses)

    def _batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: _Given
    ) -> Iterable[Microbatch] | None:
        """What the pipeline takes: None on a cloud rank that was given nothing, as it should be."""
        values = (*args, *kwargs.values(), *given)
        if not self.pipeline.mesh.is_edge and all(value is None for value in values):
            return None
        # A generator, so that it raises within the pipeline's call, which tells all ranks.
        return self._microbatches(args, kwargs, given)

    def _microbatches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: _Given
    ) -> Iterator[Microbatch]:
        number = self.n_microbatches
        target, *split = given
        if any(part is not None for part in split) and (args or kwargs or target is not None):
            raise InputValueError(
                "give a whole batch, or arg_mbs=, kwarg_mbs= and target_mbs=, not some of each"
            )
        arg_mbs, kwarg_mbs, target_mbs = given.arg_mbs, given.kwarg_mbs, given.target_mbs
        if arg_mbs is None and kwarg_mbs is None:
            arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(
                args, kwargs, number, self._args_chunk_spec, self._kwargs_chunk_spec
            )
        if target is not None:
            target_mbs = torch.tensor_split(target, number)
        parts = {
            "args": [()] * number if arg_mbs is None else arg_mbs,
            "kwargs": [{}] * number if kwarg_mbs is None else kwarg_mbs,
            "target": [None] * number if target_mbs is None else target_mbs,
        }
        for name, found in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs), ("target_mbs", target_mbs)):
            if found is not None and not isinstance(found, (list, tuple)):
                raise InputTypeError(
                    f"{name} must be a list with an entry per microbatch, got {type(found).__name__}"
                )
        for name, found in parts.items():
            if len(found) != number:
                advice = (
                    "" if any(part is not None for part in split) else ": does the batch have fewer samples?"
                )
                raise InputValueError(f"{name}: expected {number} microbatches, got {len(found)}{advice}")
        for index, (one, named, of_loss) in enumerate(zip(*parts.values(), strict=True)):
            if not isinstance(named, Mapping):
                raise InputTypeError(f"kwarg_mbs[{index}] must be a dict, got {type(named).__name__}")
            yield Microbatch(one if isinstance(one, tuple) else (one,), dict(named), of_loss)

    def _finish(self, result: StepResult, losses: list[torch.Tensor] | None) -> Any:
        if losses is not None:
            losses[:] = result.losses or []
        return None if result.outputs is None else merge_chunks(result.outputs, self._output_merge_spec)
