"""Absent gradients stay None, and unused tensors get no gradient message, whatever differs at run time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor
from uncertain_chunks import (
    ONE,
    Alternately,
    Alternating,
    Both,
    Declared,
    Either,
    EndsCut,
    First,
    Never,
    Passing,
    Returning,
    Sometimes,
    Stopping,
    Two,
    compare,
    first,
    frozen,
    made,
    seed,
    steps,
)

import ldt
from ldt.runtime import TensorSpec
from ldt.runtime.comm.shards import NodeShards
from ldt.runtime.dry_run.grad_flow import Reach
from ldt.runtime.dry_run.shape_inference import infer_reach
from ldt.testing import RankPool, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4

# Chunks, and what is sent back to the first one.
CASES: dict[str, tuple[Sequence[Any], int]] = {
    "one": ((First, First, First), ONE),
    "ignored": ((Two, First, First), ONE),
    "ignored by the tail": ((Two, Passing, First), ONE),
    "ignored by the loss": ((Two, Passing, Returning), 2 * ONE + 8),
    "used": ((Two, Both, First), 2 * ONE),
    "nothing is used": ((Two, Never, First), 0),
    "used at random": ((Two, Sometimes, First), 2 * ONE + 8),
    "used at random by the tail": ((Two, Passing, Sometimes), 2 * ONE + 8),
    "declared": ((Two, Declared, First), 2 * ONE + 8),
    "one, used at random": ((First, Either, First), ONE + 4),
    "one, used at random by the tail": ((First, First, Either), ONE + 4),
    "one, never used": ((First, First, Never), 0),
    "one, used in every other forward": ((First, Alternating, First), ONE + 4),
    "one, used in every other forward of the tail": ((First, First, Alternately), ONE + 4),
}


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "split"])
def test_none_stays_none(pool: RankPool, halves: bool) -> None:
    cases = {name: kinds for name, (kinds, _) in CASES.items()}
    expected = {name: [nbytes] * 3 for name, (_, nbytes) in CASES.items()}
    found = pool.run(steps, cases, Topology([1, 1]), halves, ranks=range(2), timeout=120)
    assert found == [expected] * 2


def test_a_tail_without_a_graph_in_its_dry_run() -> None:
    hop = [TensorSpec((4, 16), torch.float32, requires_grad=True)]
    assert infer_reach(EndsCut(), hop, {}, torch.device("cpu"), NodeShards()).reaches == (Reach(maybe=(0,)),)


LONGER = {
    "two laps": ((Two, Passing, Passing, Sometimes, First), Topology([1, 1], laps=2)),
    "two laps, dropped on the way": ((Two, Passing, Sometimes, First, First), Topology([1, 1], laps=2)),
    "three stages": ((Two, Passing, Passing, First), Topology([1, 1, 1])),
    "a stage of two ranks": ((Two, Sometimes, First), Topology([1, 2])),
}


@pytest.mark.parametrize("name", LONGER)
def test_none_stays_none_elsewhere(pool: RankPool, name: str) -> None:
    kinds, topology = LONGER[name]
    pool.run(steps, {name: kinds}, topology, ranks=range(topology.world_size))


def test_layers_that_are_left_out_at_times(pool: RankPool) -> None:
    """The dry run may take a branch in which nothing requires a gradient, and real forwards another."""
    draws = ["python", "numpy", "not in the first call", "in every other call"]
    of_head = {f"head, {draw}": (draw, frozen, First) for draw in draws}
    of_cloud = {f"cloud, {draw}": (frozen, draw, First) for draw in draws}
    pool.run(steps, of_head | of_cloud, Topology([1, 1]), ranks=range(2), timeout=120)


# -- replicas, eval, announced calls, audits ---------------------------------------------------------------------


def over_replicas() -> None:
    """A parameter that no replica uses has no gradient; one that is used in any microbatch has one."""
    topology = Topology([1, 1], dp=2)
    with ldt.connect(topology) as mesh:
        for kinds in [(Two, First, First), (Two, Sometimes, First)]:
            chunks = made(kinds)
            pipeline = build(mesh, chunks, first)
            seed(mesh.replica)
            pipeline.step(toy_microbatches(1, seed=mesh.replica) if mesh.is_edge else None)
            uses = []
            for replica in range(2):
                seed(replica)
                uses.append(sum(draw() for draw in Sometimes.draws) > 1)
            expected = kinds[1] is Sometimes and any(uses)
            assert sorted(uses) == [False, True], "this test needs other seeds"
            if mesh.is_edge:
                assert (chunks[0].u.grad is not None) == expected
                assert chunks[0].a.grad is not None


def test_replicas_of_which_one_has_a_gradient(pool: RankPool) -> None:
    pool.run(over_replicas)


def announced(path: str) -> list[tuple[str, list[int], str]]:
    """Run announced steps with an eval between. Returns the edge's audit of the gradients it received."""
    topology = Topology([1, 1])
    chunks = made((Two, Sometimes, First))
    batch = toy_microbatches(2)
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks, first, audit=path if mesh.is_edge else None)
        pipeline.step(batch if mesh.is_edge else None, upcoming=batch if mesh.is_edge else None)
        pipeline.step(batch if mesh.is_edge else None)
        assert not any(
            name[0] == "B" for name in pipeline.eval(batch if mesh.is_edge else None).stats.channels
        )
        hops = pipeline.validate(batch if mesh.is_edge else None)
        assert [[spec.used for spec in specs] for specs in hops[0]] == [[None, None], [True]]
    lines = map(json.loads, Path(path).read_text().splitlines()) if mesh.is_edge else ()
    return [
        (line["channel"], line["shape"], line["dtype"]) for line in lines if line["purpose"] == "gradient"
    ]


def test_announced_calls_and_audits(pool: RankPool, tmp_path: Path) -> None:
    gradients, _ = pool.run(announced, str(tmp_path / "audit"), ranks=range(2))
    assert [tuple(line) for line in gradients] == [("B1:0.0->1.0", [4, 16], "float32")] * 4


# -- refused: gradients that contradict the dry run ---------------------------------------------------------------


class Changing(First):
    """Uses the second tensor or the first, depending on its state."""

    uses = (True, False)

    def forward(self, x: Tensor, u: Tensor) -> Any:  # type: ignore[override]
        return super().forward(
            sum((t for t, use in zip((x, u), self.uses, strict=True) if use), torch.ones(4, 16))
        )


class Stopped(First):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(Stopping.apply(x))  # type: ignore[no-untyped-call]


def changed(uses: tuple[bool, bool], forget: bool) -> str:
    topology = Topology([1, 1])
    chunks = made((Two, Changing, First))
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks, first)
        compare(mesh, pipeline, chunks, 0)
        chunks[1].uses = uses  # type: ignore[assignment]
        if forget:
            pipeline.forget_shapes()
        try:
            compare(mesh, pipeline, chunks, 0)
        except ldt.LdtError as error:
            return str(error)
    return ""


def stopped() -> str:
    topology = Topology([1, 1])
    chunks = made((First, Stopped, First))
    with ldt.connect(topology, ranks=range(2)) as mesh:
        try:
            build(mesh, chunks, first).step(toy_microbatches(2) if mesh.is_edge else None)
        except ldt.LdtError as error:
            return str(error)
    return ""


def test_a_state_that_changes_after_shapes_were_inferred(pool: RankPool) -> None:
    for text in pool.run(changed, (True, True), False, ranks=range(2)):
        assert (
            "chunk 1 gives a gradient to its input float32[4, 16] with grad (1 of those that require one)"
            in text
        )
        assert "pipeline.forget_shapes() on every rank" in text
    for text in pool.run(changed, (False, False), False, ranks=range(2)):
        assert "chunk 1 gave no gradient to its input (0 of those that require one) in any microbatch" in text
    assert pool.run(changed, (True, True), True, ranks=range(2)) == [""] * 2
    assert pool.run(changed, (False, False), True, ranks=range(2)) == [""] * 2


def test_a_function_that_stops_gradients(pool: RankPool) -> None:
    for text in pool.run(stopped, ranks=range(2)):
        assert "chunk 1 gave no gradient to its input (0 of those that require one) in any microbatch" in text
