"""Finding what hops carry: what is kept and for how long, and that it leaves no trace in a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_jobs import build, step_and_compare
from torch import Tensor, nn

import ldt
from ldt.runtime.shapes import infer_specs
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3


class Remembering(nn.Module):
    """Keeps what it saw, in containers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[Any] = ["before"]
        self.by_name: dict[str, Any] = {"before": 1}
        self.kinds: set[Any] = {"before"}

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.by_name["x"] = x
        self.by_name.pop("before", None)
        self.kinds.add(type(x))
        self.linear.extra = x  # type: ignore[assignment]
        return self.linear(x)  # type: ignore[no-any-return]


def test_containers_of_a_module_are_put_back() -> None:
    module = Remembering()
    seen = module.seen
    infer_specs(0, module, (torch.ones(2, 4),), {}, torch.device("cpu"), training=True)
    assert module.seen is seen
    assert module.seen == ["before"]
    assert module.by_name == {"before": 1}
    assert module.kinds == {"before"}
    assert not hasattr(module.linear, "extra")


class Scaled(ToyChunk):
    def forward(self, x: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


def many_values() -> int:
    """Every step has another number among the inputs of the head."""
    topology = Topology([1, 1])
    chunks = [Scaled(16), ToyChunk(16), ToyChunk(16)]
    with ldt.connect(topology, ranks=[0, 1]) as mesh:
        pipeline = build(mesh, chunks)
        for start in range(0, 300, 100):
            pairs = toy_microbatches(100)
            batch = [((x, float(start + n)), y) for n, (x, y) in enumerate(pairs)]
            pipeline.eval(batch if mesh.is_edge else None)
        return len(pipeline._shapes._heads)


def test_kept_shapes_are_bounded(pool: RankPool) -> None:
    assert pool.run(many_values, ranks=[0, 1]) == [256, 0]


def under_autocast(everywhere: bool) -> str:
    topology = Topology([1, 1, 1])
    torch.manual_seed(0)
    chunks = [nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), ToyChunk(16)]
    with ldt.connect(topology) as mesh:
        pipeline = build(mesh, chunks)
        for _ in range(2):
            step_and_compare(mesh, pipeline, chunks, toy_microbatches(2))
            try:
                with torch.autocast("cpu", torch.bfloat16, enabled=everywhere or mesh.rank == 1):
                    step_and_compare(mesh, pipeline, chunks, toy_microbatches(2))
            except ldt.LdtError as error:
                return str(error)
    return ""


def test_autocast_between_steps(pool: RankPool) -> None:
    """It changes the dtype of what hops carry, and needs no word."""
    assert pool.run(under_autocast, True) == [""] * 3


def test_autocast_on_one_rank_only(pool: RankPool) -> None:
    for text in pool.run(under_autocast, False):
        assert "autocast must be the same on all ranks" in text
        assert "pipeline.forget_shapes() on every rank" in text


@pytest.mark.parametrize("laps", [1, 2])
def test_nothing_is_asked_where_nothing_is_sent(laps: int) -> None:
    topology = Topology([1], laps=laps)
    chunks = toy_chunks(topology)
    with ldt.connect(topology) as mesh:
        pipeline = build(mesh, chunks)
        step_and_compare(mesh, pipeline, chunks, toy_microbatches(2))
        assert len(pipeline._shapes._heads) == 0
