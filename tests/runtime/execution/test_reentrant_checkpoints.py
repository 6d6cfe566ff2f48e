"""A reentrant checkpoint trains its layers only if its input requires a gradient, after a hop as anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pipeline_jobs import build, step_and_compare
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ldt
from ldt.testing import RankPool, ToyChunk, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
BATCH = toy_microbatches(4)


class Layer(ToyChunk):
    def __init__(self) -> None:
        super().__init__(16)


class CutAtTimes(Layer):
    """Cuts the graph after all of its layers in every other forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x).detach() if self.calls % 2 else super().forward(x)


class Frozen(Layer):
    """Its trained output is never used, so its result never requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.unused = nn.Linear(16, 16)


class Plain(nn.Module):
    """Trains nothing: its output requires a gradient if its input does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class Reentrant(Layer):
    reentrant = True

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x.sin(), use_reentrant=self.reentrant)


class NotReentrant(Reentrant):
    reentrant = False


Kinds = Sequence[type[nn.Module]]
EQUAL: dict[str, Kinds] = {
    "what it takes requires a gradient": (Layer, Reentrant, Layer),
    "not reentrant": (CutAtTimes, NotReentrant, Layer),
    "frozen": (Frozen, Reentrant, Layer),
    "behind a layer that is trained": (CutAtTimes, Layer, Reentrant),
}
REFUSED: dict[str, tuple[Kinds, int]] = {
    "cut at times": ((CutAtTimes, Reentrant, Layer), 0),
    "cut at times, before the last chunk": ((Layer, CutAtTimes, Reentrant), 1),
    "behind a stage that trains nothing": ((CutAtTimes, Plain, Reentrant, Layer), 0),
}


def made(kinds: Kinds) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind() for kind in kinds]


def equal_steps() -> None:
    with ldt.connect(Topology([1, 1]), ranks=range(2)) as mesh:
        for kinds in EQUAL.values():
            chunks = made(kinds)
            step_and_compare(mesh, build(mesh, chunks), chunks, BATCH)


def refusal(kinds: Kinds) -> str:
    """Return the error of a step of these chunks on this rank."""
    stages = len(kinds) - 1
    with ldt.connect(Topology([1] * stages), ranks=range(stages)) as mesh:
        pipeline = build(mesh, made(kinds))
        with pytest.raises(ldt.LdtError) as raised:
            pipeline.step(BATCH if mesh.is_edge else None)
    return str(raised.value)


def test_equal_where_the_checkpoint_knows(pool: RankPool) -> None:
    pool.run(equal_steps, ranks=range(2))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_where_it_cannot_know(pool: RankPool, name: str) -> None:
    kinds, chunk = REFUSED[name]
    for text in pool.run(refusal, kinds, ranks=range(len(kinds) - 1)):
        assert f"output of chunk {chunk} for microbatch" in text
        assert "use_reentrant=False" in text
