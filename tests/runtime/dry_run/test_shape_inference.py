"""Tests shape inference: what is cached and for how long, and that it leaves no trace in a module."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from pipeline_jobs import build, step_and_compare
from torch import Tensor, nn

import ldt
from ldt.runtime.dry_run.shape_inference import infer_specs
from ldt.runtime.step import shape_cache
from ldt.runtime.step.microbatch import Microbatch
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3


class Remembering(nn.Module):
    """Records its inputs in containers of its own."""

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


def test_containers_of_a_module_are_restored() -> None:
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
    """Pass a different number to the head in every step."""
    topology = Topology([1, 1])
    chunks = [Scaled(16), ToyChunk(16), ToyChunk(16)]
    with ldt.connect(topology, ranks=[0, 1]) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape_cache, "CACHE_SIZE", 256)
        pipeline = build(mesh, chunks)
        for start in range(0, 300, 100):
            pairs = toy_microbatches(100)
            batch = [((x, float(start + n)), y) for n, (x, y) in enumerate(pairs)]
            pipeline.eval(batch if mesh.is_edge else None)
        return len(pipeline._shapes._heads)


def test_kept_shapes_are_bounded(pool: RankPool) -> None:
    assert pool.run(many_values, ranks=[0, 1]) == [256, 0]


class Sized(ToyChunk):
    def forward(self, x: Tensor, rows: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x)[: int(rows[2500])]


def rows_in_an_array() -> None:
    """Pass long arrays whose repr is the same."""
    chunks = [Sized(16), ToyChunk(16), ToyChunk(16)]
    with ldt.connect(Topology([1, 1]), ranks=[0, 1]) as mesh:
        pipeline = build(mesh, chunks, loss_fn=None)
        for rows in (4, 3, 2):
            array = numpy.zeros(5000)
            array[2000:-1000] = rows
            result = pipeline.eval([((torch.ones(4, 16), array), None)] if mesh.is_edge else None)
            assert result.outputs is None or result.outputs[0].shape == (rows, 16)


def test_inputs_that_cannot_be_compared_are_not_cached(pool: RankPool) -> None:
    pool.run(rows_in_an_array, ranks=[0, 1])


def test_signatures_distinguish_values() -> None:
    def signature(*args: Any) -> object:
        return Microbatch(args, {}, None).signature

    assert signature(torch.ones(2), 1) == signature(torch.zeros(2), 1)
    assert signature(1) != signature(True) != signature(1.0)
    assert signature("a") == signature("a") != signature(b"a")
    assert signature(object()) != signature(object())


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
    """It changes the dtype of hops without further calls."""
    assert pool.run(under_autocast, True) == [""] * 3


def test_autocast_on_one_rank_only(pool: RankPool) -> None:
    for text in pool.run(under_autocast, False):
        assert "autocast must be the same on all ranks: here it is bfloat16, on the edge off" in text


@pytest.mark.parametrize("laps", [1, 2])
def test_no_inference_without_hops(laps: int) -> None:
    topology = Topology([1], laps=laps)
    chunks = toy_chunks(topology)
    with ldt.connect(topology) as mesh:
        pipeline = build(mesh, chunks)
        step_and_compare(mesh, pipeline, chunks, toy_microbatches(2))
        assert len(pipeline._shapes._heads) == 0
