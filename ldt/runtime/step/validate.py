"""Checks all stage boundaries on fake tensors: every chunk accepts its inputs and returns the agreed specs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ldt.errors import LdtError
from ldt.runtime.common.auxiliary_loss import without_losses
from ldt.runtime.common.chunk_outputs import as_tensors
from ldt.runtime.common.kept import mark_kept
from ldt.runtime.common.output_marks import num_positional
from ldt.runtime.common.redact import QuotingError, redacted, unredacted
from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec, describe, first_difference
from ldt.runtime.dry_run.grad_flow import DryRun
from ldt.runtime.dry_run.shape_inference import dry_run, needs_values
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.data_parallel import is_fully_sharded
from ldt.runtime.model.keywords import declares
from ldt.runtime.step.handshake import StepContext
from ldt.runtime.step.microbatch import Microbatch
from ldt.runtime.step.shape_cache import ShapeCache
from ldt.runtime.step.shape_walk import inputs_of
from ldt.topology import Topology

__all__ = ["validate_chunks"]

logger = logging.getLogger(__name__)


def validate_chunks(
    mesh: Mesh,
    shapes: ShapeCache,
    context: StepContext,
    microbatches: Sequence[Microbatch] | None,
    training: bool,
) -> None:
    """Run this rank's chunks on fake tensors with the specs of their hops, the head on ``microbatches``.

    Chunks with an ``output_spec`` run, too. Raises LdtError naming chunk, tensor and both shapes if a chunk does not
    accept its inputs, or returns other tensors than agreed. Chunks that cannot run without values, and chunks in
    ``fully_shard``, are skipped and logged.
    """
    for chunk, module in shapes.chunks.items():
        if is_fully_sharded(module):
            logger.info(
                "chunk %d is not checked: fake tensors cannot replace the weights in fully_shard", chunk
            )
            continue
        cases = _head_cases(microbatches or (), training) if chunk == 0 else ()
        if mesh.topology.crosses(chunk - 1):
            cases = _chunk_cases(mesh.topology, chunk, context, training)
        for case in cases:
            _validate(mesh, shapes, case, context)


class _Case(NamedTuple):
    """A chunk and its inputs for a microbatch."""

    chunk: int
    microbatch: int
    args: Sequence[Any]
    offered: Mapping[str, Any]
    training: bool


def _head_cases(microbatches: Sequence[Microbatch], training: bool) -> Iterable[_Case]:
    """One case for each kind of microbatch."""
    cases: dict[object, _Case] = {}
    for index, microbatch in enumerate(microbatches):
        cases.setdefault(microbatch.signature, _Case(0, index, microbatch.args, microbatch.kwargs, training))
    return cases.values()


def _chunk_cases(topology: Topology, chunk: int, context: StepContext, training: bool) -> Iterable[_Case]:
    """One case for each kind of input."""
    cases: dict[object, _Case] = {}
    for index, (carried, offered) in enumerate(zip(context.hops, context.keywords, strict=True)):
        kind = (tuple(carried), _shapes_of(offered))
        inputs = without_losses(inputs_of(topology, carried, chunk))
        cases.setdefault(kind, _Case(chunk, index, inputs, offered, training))
    return cases.values()


def _validate(mesh: Mesh, shapes: ShapeCache, case: _Case, context: StepContext) -> None:
    chunk, microbatch, args, offered, training = case
    module = shapes.chunks[chunk]
    kwargs = shapes.keywords_for(chunk, offered, num_positional(args))
    try:
        read = partial(_specs_of, mesh, case)
        found = dry_run(module, args, kwargs, mesh.device, training, mesh.shards, read)
    except Exception as error:
        if needs_values(error):
            logger.info(
                "chunk %d cannot run without values and is not checked: %s", chunk, unredacted(error)[0]
            )
            return
        inputs = describe(
            [arg if isinstance(arg, TensorSpec) else TensorSpec.of(arg) for arg in args if _has_spec(arg)]
        )
        what = f"chunk {chunk} does not accept its inputs for microbatch {microbatch}, {inputs}"
        advice = shapes.hooks.advice(chunk, module)
        raise QuotingError(
            f"{what}: {unredacted(error)[0].rstrip('. ')}{advice}",
            plain=f"{what}: {redacted(error).rstrip('. ')}{advice}",
        ) from error
    if isinstance(found, Exception):
        raise found
    if mesh.topology.crosses(chunk):
        declared = declares(module)
        difference = first_difference(without_losses(context.hops[microbatch][chunk]), found, declared)
        if difference is not None:
            expected = "it declares (output_spec)" if declared else "was agreed"
            raise LdtError(
                f"output of chunk {chunk} for microbatch {microbatch} is not what {expected}: {difference}"
            )


def _specs_of(mesh: Mesh, case: _Case, run: DryRun) -> HopSpecs | Exception:
    """Return the specs of the chunk's output, or the error that prevents them."""
    if not mesh.topology.crosses(case.chunk):
        return ()
    what = f"output of chunk {case.chunk} for microbatch {case.microbatch}"
    try:
        outputs = as_tensors(run.output, case.chunk)
        found = mark_kept(mesh.shards.specs_of(outputs, what), outputs.num_kept)
    except Exception as error:
        return error.with_traceback(None)
    return found if case.training else tuple(spec.without_grad() for spec in found)


def _has_spec(arg: object) -> bool:
    return isinstance(arg, (TensorSpec, torch.Tensor))


def _shapes_of(offered: Mapping[str, Any]) -> object:
    return tuple(
        (name, TensorSpec.of(v) if isinstance(v, torch.Tensor) else None) for name, v in offered.items()
    )
