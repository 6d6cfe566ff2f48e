"""Gradients that there are not: none stays none, nothing crosses for what is not used, whatever differs at run time."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn

import ldt
from ldt.plan import Action, Kind, ushape
from ldt.plan.passes import add_communication, remove_communication
from ldt.runtime import TensorSpec
from ldt.runtime.comm.shards import NodeShards
from ldt.runtime.comm.transfer import Transfer
from ldt.runtime.dry_run.grad_flow import Reach
from ldt.runtime.dry_run.shape_inference import infer_reach
from ldt.testing import RankPool, ToyChunk, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 4
Chunks = Sequence[nn.Module]


class Two(nn.Module):
    """Two products of what comes, the second by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.u = (nn.Parameter(torch.full((16,), scale)) for scale in (2.0, 3.0))

    def forward(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.a, x * self.u


class First(ToyChunk):
    """Uses the first tensor alone."""

    def __init__(self) -> None:
        super().__init__(16)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return super().forward(x)


class Passing(First):
    """Passes the second on, so that the next chunk decides."""

    def forward(self, x: Tensor, u: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), u * 2


class Both(First):
    def forward(self, x: Tensor, u: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) + u


class Returning(First):
    """A last chunk that returns both, of which a loss takes one."""

    def forward(self, x: Tensor, u: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), u.tanh()


class Sometimes(First):
    """Uses the second where a draw says so."""

    draws = (random.random, numpy.random.rand)

    def forward(self, x: Tensor, u: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) + (u if sum(draw() for draw in self.draws) > 1 else 0)


class Either(First):
    """Uses its only input where a draw says so."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x if random.random() > 0.5 else torch.ones(4, 16))


class Alternating(First):
    """Cuts the graph in every other forward, the first or the second."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.calls = start

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x.detach() if self.calls % 2 else x)


class Alternately(Alternating):
    def __init__(self) -> None:
        super().__init__(start=1)


class EndsCut(nn.Module):
    """Cuts the graph behind all of its layers in every other forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = ToyChunk(16), 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.body(x).detach() if self.calls % 2 else self.body(x)


class Never(First):
    def forward(self, *tensors: Tensor) -> Tensor:
        return super().forward(torch.ones(4, 16))


class Declared(Sometimes):
    def output_spec(self, x: TensorSpec, u: TensorSpec) -> TensorSpec:
        return TensorSpec(x.shape, x.dtype, requires_grad=True)


class Stopping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Dropping(nn.Module):
    """Layerdrop: whether its only trained layer runs is drawn anew each time, or shows in its state."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.draw, self.calls = draw, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        draws = {
            "python": random.random,
            "numpy": numpy.random.rand,
            "not in the first call": lambda: self.calls > 1,
            "in every other call": lambda: self.calls % 2,
        }
        return self.linear(x) if draws[self.draw]() > 0.5 else x * 1.0


def frozen() -> nn.Module:
    return nn.Linear(16, 16).requires_grad_(False)


def seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)


def first(output: Any, target: Tensor) -> Tensor:
    """The loss of the first output."""
    return toy_loss(output[0] if isinstance(output, tuple) else output, target)


def compare(mesh: ldt.Mesh, pipeline: ldt.Pipeline, chunks: Chunks, number: int) -> dict[str, int]:
    """A step against the unsplit model, none told from zeros. Returns the bytes backward, by channel."""
    batch = toy_microbatches(4)
    for chunk in chunks:
        chunk.zero_grad()
    seed(number)
    losses, reference = unsplit_step(chunks, batch, first)
    seed(number)
    result = pipeline.step(batch if mesh.is_edge else None)
    assert result.losses is None or all(map(torch.equal, result.losses, losses))
    for index in mesh.topology.chunks_of(mesh.stage):
        pairs = zip(chunks[index].named_parameters(), reference[index].parameters(), strict=True)
        for (name, mine), theirs in pairs:
            assert (mine.grad is None) == (theirs.grad is None), (index, name, mine.grad, theirs.grad)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad), (index, name)  # type: ignore[arg-type]
    for chunk, twin in zip(chunks, reference, strict=True):
        if isinstance(chunk, (Dropping, Alternating)):
            chunk.calls = twin.calls  # type: ignore[assignment]
    return {name: traffic.bytes for name, traffic in result.stats.channels.items() if name[0] == "B"}


def split(plan: ldt.plan.Plan) -> ldt.plan.Plan:
    """Every B as an I and a W."""
    bare = remove_communication(plan)
    rows = {}
    for node, row in bare.rows.items():
        parts: list[Action] = []
        for action in row:
            kinds = (Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,)
            parts += [action._replace(kind=kind) for kind in kinds]
        rows[node] = tuple(parts)
    return add_communication(bare.with_rows(rows, None), plan.lanes or "dedicated")


def made(kinds: Sequence[Any]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Dropping(kind) if isinstance(kind, str) else kind() for kind in kinds]


def steps(cases: dict[str, Sequence[Any]], topology: Topology, halves: bool = False) -> dict[str, list[int]]:
    """Three steps of each case's chunks. Returns the bytes of each that came back to the first chunk."""
    found = {}
    transfer: Transfer = "leader" if topology.tp[-1] == 1 else "direct"
    with ldt.connect(topology, ranks=range(topology.world_size), transfer=transfer) as mesh:
        for name, kinds in cases.items():
            chunks = made(kinds)
            plan = split(ushape(topology, 4)) if halves else None
            pipeline = build(mesh, chunks, first, plan=plan)
            try:
                counts = [compare(mesh, pipeline, chunks, number) for number in range(3)]
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
            found[name] = [
                sum(nbytes for hop, nbytes in step.items() if hop.startswith("B0")) for step in counts
            ]
    return found


ONE = 4 * 4 * 16 * 4  # bytes of four microbatches of float32[4, 16]
# Chunks, and what comes back to the first one.
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
    """The dry run may take a way on which nothing requires a gradient, real forwards others."""
    draws = ["python", "numpy", "not in the first call", "in every other call"]
    of_head = {f"head, {draw}": (draw, frozen, First) for draw in draws}
    of_cloud = {f"cloud, {draw}": (frozen, draw, First) for draw in draws}
    pool.run(steps, of_head | of_cloud, Topology([1, 1]), ranks=range(2), timeout=120)


# -- replicas, eval, calls told ahead, audits --------------------------------------------------------------------


def over_replicas() -> None:
    """What no replica uses has no gradient; what one uses in one microbatch has."""
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


def told_ahead(path: str) -> list[tuple[str, list[int], str]]:
    """Steps that are told of ahead, with an eval between. Returns the edge's audit of gradients on their way back."""
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


def test_calls_told_ahead_and_audits(pool: RankPool, tmp_path: Path) -> None:
    gradients, _ = pool.run(told_ahead, str(tmp_path / "audit"), ranks=range(2))
    assert [tuple(line) for line in gradients] == [("B1:0.0->1.0", [4, 16], "float32")] * 4


# -- what cannot be right is refused -----------------------------------------------------------------------------


class Changing(First):
    """Uses the second tensor, or the first, as its state says."""

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
