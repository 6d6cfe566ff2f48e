"""Steps in which a chunk runs some code of a test, and the errors of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from pipeline_jobs import build
from torch import nn

import ldt
from ldt.testing import ToyChunk, toy_microbatches
from ldt.topology import Topology


class BoomError(Exception):
    pass


class Doing(ToyChunk):
    """Calls ``armed``, once, in its forward of a microbatch."""

    def __init__(self) -> None:
        super().__init__(16)
        self.armed: Callable[[], object] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and self.armed is not None:
            act, self.armed = self.armed, None
            act()
        return super().forward(x)


def caught_in_a_step(mesh: ldt.Mesh, chunks: list[nn.Module]) -> tuple[int | None, str, float]:
    """Return the rank that a step's error names, its text, and the seconds until it was raised."""
    pipeline = build(mesh, chunks)
    start = time.monotonic()
    with pytest.raises(ldt.LdtError) as caught:  # noqa: PT012
        pipeline.step(toy_microbatches(4) if mesh.is_edge else None)
        pipeline.step(toy_microbatches(4) if mesh.is_edge else None)
    return getattr(caught.value, "rank", None), str(caught.value), time.monotonic() - start


def chunks_doing(topology: Topology, chunk: int, act: Callable[[], object]) -> list[nn.Module]:
    torch.manual_seed(0)
    chunks = [Doing() for _ in range(topology.num_chunks)]
    chunks[chunk].armed = act
    return list(chunks)
