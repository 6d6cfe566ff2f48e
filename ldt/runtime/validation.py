"""A dry check of all stage boundaries: does every chunk take what comes, and return what others were told?"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ldt.errors import LdtError
from ldt.runtime.disclosure import QuotingError, disclose, reveal
from ldt.runtime.inference import dry_run, needs_values
from ldt.runtime.mesh import Mesh
from ldt.runtime.outputs import as_tensors
from ldt.runtime.shapes import ShapeBook
from ldt.runtime.specs import HopSpecs, TensorSpec, describe, first_difference

__all__ = ["validate_chunks"]

logger = logging.getLogger(__name__)


def validate_chunks(
    mesh: Mesh,
    shapes: ShapeBook,
    hops: Sequence[Sequence[HopSpecs]],
    keywords: Sequence[Mapping[str, Any]],
) -> None:
    """Run this rank's chunks on fake tensors of what ``hops[m][c]`` carry, whether they declare shapes or not.

    Raises LdtError naming chunk, tensor and both shapes where one does not take what comes, or returns other tensors
    than were agreed. Chunks that cannot run without values are taken at their word, with a line in the log.
    """
    for chunk in filter(lambda chunk: mesh.topology.crosses(chunk - 1), shapes.chunks):
        first: dict[object, int] = {}  # microbatch of each kind
        for microbatch, (carried, offered) in enumerate(zip(hops, keywords, strict=True)):
            first.setdefault((tuple(carried), _shapes_of(offered)), microbatch)
        for microbatch in first.values():
            _validate(mesh, shapes, chunk, microbatch, hops[microbatch], keywords[microbatch])


def _validate(
    mesh: Mesh,
    shapes: ShapeBook,
    chunk: int,
    microbatch: int,
    hops: Sequence[HopSpecs],
    offered: Mapping[str, Any],
) -> None:
    comes = hops[chunk - 1]
    kwargs = shapes.keywords_for(chunk, offered, len(comes))
    try:
        output = dry_run(shapes.chunks[chunk], comes, kwargs, mesh.device, True, mesh.shards)
    except Exception as error:
        if needs_values(error):
            logger.info("chunk %d cannot run without values and is not checked: %s", chunk, error)
            return
        what = f"chunk {chunk} does not take what comes for microbatch {microbatch}, {describe(comes)}"
        raise QuotingError(f"{what}: {reveal(error)[0]}", plain=f"{what}: {disclose(error)}") from error
    if mesh.topology.crosses(chunk):
        what = f"output of chunk {chunk} for microbatch {microbatch}"
        difference = first_difference(hops[chunk], mesh.shards.specs_of(as_tensors(output, chunk), what))
        if difference is not None:
            raise LdtError(f"{what} is not what it declares (output_spec): {difference}")


def _shapes_of(offered: Mapping[str, Any]) -> object:
    return tuple(
        (name, TensorSpec.of(v) if isinstance(v, torch.Tensor) else None) for name, v in offered.items()
    )
