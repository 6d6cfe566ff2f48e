"""ldt.add_loss in chunks of any stage: gradients, values and scales are those of the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ldt
from ldt.plan import Costs, optimize
from ldt.testing import RankPool, ToyChunk, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4
NUMBER = 3


class Penalized(ToyChunk):
    """Adds the mean square of its hidden states, with a trained factor."""

    def __init__(
        self, width: int, name: str = "size", weight: float = 0.5, reentrant: bool | None = None
    ) -> None:
        super().__init__(width)
        self.factor = nn.Parameter(torch.ones(()))
        self.name, self.weight, self.reentrant = name, weight, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self._run(x)
        result: Tensor = checkpoint(self._run, x, use_reentrant=self.reentrant)
        return result

    def _run(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return ldt.add_loss(hidden, self.factor * hidden.square().mean(), self.name, self.weight)


class Unsplit:
    """The same chunks in a row, with their losses collected: a second implementation."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.chunks = copy.deepcopy(list(chunks))

    def run(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        total, values = torch.zeros(()), {}
        for chunk in self.chunks:
            if isinstance(chunk, Penalized):
                x = ToyChunk.forward(chunk, x)
                loss = chunk.factor * x.square().mean()
                values[chunk.name] = values.get(chunk.name, 0.0) + loss.detach()
                total = total + chunk.weight * loss
            else:
                x = chunk(x)
        return x, values, total


def chunks_of(topology: Topology, plain: Sequence[int] = (), **options: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        ToyChunk(16) if index in plain else Penalized(16, f"size {index % 2}", **options)
        for index in range(topology.num_chunks)
    ]


def token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Tokens are rows; the microbatches have different numbers of them."""
    return (output - target).square().mean(-1).sum(), len(output)


def uneven(edge: int) -> list[tuple[Tensor, Tensor]]:
    return [
        (x[: 1 + m + edge], y[: 1 + m + edge]) for m, (x, y) in enumerate(toy_microbatches(NUMBER, seed=edge))
    ]


Batches = list[list[tuple[Tensor, Tensor]]]


def objective(
    model: Unsplit, batches: list[list[tuple[Tensor, Tensor]]], reduction: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """What a step minimizes over all edge replicas, and the values of the first."""
    parts, counts, found = [], [], []
    for batch in batches:
        for x, y in batch:
            output, values, added = model.run(x)
            size = len(x) if reduction == "token" else 1
            parts.append((toy_loss(output, y) + added) * size)
            counts.append(size)
            found.append({name: value * size for name, value in values.items()})
    first = found[: len(batches[0])]
    divisor = {"mean": len(counts), "token": sum(counts), "sum": 1}[reduction]
    of_first = {"mean": len(first), "token": sum(counts[: len(first)]), "sum": 1}[reduction]
    means = {name: sum(values.get(name, torch.zeros(())) for values in first) / of_first for name in first[0]}
    return torch.stack(parts).sum() / divisor, means


def compare(
    topology: Topology,
    reduction: str,
    options: dict[str, Any],
    split: bool = False,
    scale: float | None = None,
    compression: str = "none",
) -> None:
    chunks = chunks_of(topology, **options)
    batches = [uneven(edge) for edge in range(topology.edge_dp)]
    model = Unsplit(chunks)
    total, means = objective(model, batches, reduction)
    (total * (scale or 1.0)).backward()
    near: dict[str, Any] = {"rtol": 0.05, "atol": 0.01} if compression != "none" else {}
    plan = None
    if split or not topology.is_looped:
        costs = Costs(1.0, 2.0, weight=1.0 if split else None)
        plan = optimize(topology, NUMBER, costs, split_backward=split)
    ranks = range(topology.world_size)
    with ldt.connect(topology, ranks=ranks, compression=compression) as mesh:  # type: ignore[arg-type]
        loss = token_loss if reduction == "token" else toy_loss
        scaled = None if scale is None else lambda loss: loss * scale
        pipeline = build(mesh, chunks, loss_fn=loss, loss_reduction=reduction, plan=plan, scale_root=scaled)
        for _ in range(2):
            for chunk in chunks:
                chunk.zero_grad()
            result = pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
        if mesh.is_edge and mesh.replica == 0:
            assert result.auxiliary.keys() == means.keys()
            for name, value in means.items():
                torch.testing.assert_close(result.auxiliary[name], value, check_dtype=False, **near)
                assert ldt.scalars(result)[f"auxiliary/{name}"] == pytest.approx(
                    float(value), rel=0.05 if near else None
                )
        elif not mesh.is_edge:
            assert result.auxiliary == {}
        for index in topology.chunks_of(mesh.stage):
            for got, wanted in zip(chunks[index].parameters(), model.chunks[index].parameters(), strict=True):
                torch.testing.assert_close(got.grad, wanted.grad, **near)
        evaluated = pipeline.eval(batches[mesh.replica] if mesh.is_edge else None)
        if mesh.is_edge and mesh.replica == 0:
            for name, value in means.items():
                torch.testing.assert_close(evaluated.auxiliary[name], value, check_dtype=False, **near)
        pipeline.validate(batches[mesh.replica] if mesh.is_edge else None)


TOPOLOGIES = [
    Topology([1]),
    Topology([1, 1, 1]),
    Topology([1, 1], laps=2),
    Topology([1, 2]),
    Topology([1, 1], dp=2),
    Topology([1, 1], dp=2, edge_dp=1),
    Topology([1, 1, 1], placement=[0, 1, 2, 2, 1, 0]),
]


@pytest.mark.parametrize("reduction", ["mean", "sum", "token"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=Topology.to_text)
def test_a_step_minimizes_all_losses(pool: RankPool, topology: Topology, reduction: str) -> None:
    pool.run(compare, topology, reduction, {}, ranks=range(topology.world_size))


@pytest.mark.parametrize("plain", [(0,), (1,), (0, 1, 3), (0, 2, 3)], ids=str)
def test_some_chunks_have_none(pool: RankPool, plain: tuple[int, ...]) -> None:
    """Chunks behind those that add a loss pass it on, those before carry nothing."""
    pool.run(compare, Topology([1, 1, 1]), "mean", {"plain": plain}, ranks=range(3))


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(pool: RankPool, reentrant: bool) -> None:
    """Not in the head: a reentrant checkpoint trains nothing without an input that requires a gradient."""
    pool.run(compare, Topology([1, 1, 1]), "token", {"reentrant": reentrant, "plain": (0,)}, ranks=range(3))


@pytest.mark.parametrize("topology", [TOPOLOGIES[1], TOPOLOGIES[6]], ids=Topology.to_text)
def test_in_a_split_backward(pool: RankPool, topology: Topology) -> None:
    pool.run(compare, topology, "token", {}, True, ranks=range(topology.world_size))


def test_compressed_links_carry_them_as_they_are(pool: RankPool) -> None:
    """Hidden states are rounded, and so are losses of them by a little."""
    pool.run(compare, Topology([1, 1]), "token", {}, False, None, "bf16", ranks=range(2))


class WithPenalty(nn.Module):
    """A loss function that adds one, too."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ldt.add_loss(toy_loss(output, target), output.square().mean(), "of the loss", 0.5)


def of_the_loss() -> None:
    topology = Topology([1, 1])
    chunks = chunks_of(topology)
    model = Unsplit(chunks)
    batch = uneven(0)
    total, size = torch.zeros(()), torch.zeros(())
    for x, y in batch:
        output, _, added = model.run(x)
        total = total + (toy_loss(output, y) + added + 0.5 * output.square().mean()) / NUMBER
        size = size + output.detach().square().mean() / NUMBER
    total.backward()
    with ldt.connect(topology, ranks=range(2)) as mesh:
        result = build(mesh, chunks, WithPenalty()).step(batch if mesh.is_edge else None)
        if mesh.is_edge:
            torch.testing.assert_close(result.auxiliary["of the loss"], size, check_dtype=False)
        for index in topology.chunks_of(mesh.stage):
            for got, wanted in zip(chunks[index].parameters(), model.chunks[index].parameters(), strict=True):
                torch.testing.assert_close(got.grad, wanted.grad)


def test_a_loss_function_may_add_one(pool: RankPool) -> None:
    pool.run(of_the_loss, ranks=range(2))


def test_scaled_roots_scale_them(pool: RankPool) -> None:
    pool.run(compare, Topology([1, 1, 1]), "mean", {}, False, 8.0, ranks=range(3))


class Wrong(ToyChunk):
    """What is wrong is a number, as chunks are pickled by name."""

    def __init__(self, kind: str) -> None:
        super().__init__(16)
        self.kind, self.calls = kind, 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        loss = hidden.square().mean()
        self.calls += 1
        if self.kind == "unused":
            ldt.add_loss(hidden, loss, "size")
        elif self.kind == "shape":
            hidden = ldt.add_loss(hidden, hidden, "size")
        elif self.kind == "type":
            hidden = ldt.add_loss(hidden, 1.0, "size")  # type: ignore[arg-type]
        elif self.kind == "name":
            hidden = ldt.add_loss(hidden, loss, "")
        elif self.kind == "NaN":
            hidden = ldt.add_loss(hidden, loss * float("nan"), "size")
        elif self.kind == "unknown" and type(x) is Tensor:  # not in the dry run
            hidden = ldt.add_loss(hidden, loss, "late")
        return hidden


WRONG = {
    "unused": r"chunk 1 added auxiliary losses \(size\) without a gradient for one of them",
    "shape": r"add_loss needs a real scalar loss, got torch.float32 of shape \[\d, 16\] as 'size'",
    "type": "add_loss needs a loss that is a torch.Tensor, got float",
    "name": "add_loss needs a name of 1 to 100 characters, got 0",
    "NaN": "the auxiliary loss 'size', float64.*, has 1 NaN",
    "unknown": "chunk 1 added the auxiliary loss 'late' for microbatch 0, which its dry run did not",
}


def wrong(kind: str) -> None:
    topology = Topology([1, 1, 1])
    chunks = chunks_of(topology)
    chunks[1] = Wrong(kind)
    with ldt.connect(topology, ranks=range(3)) as mesh:
        pipeline = build(mesh, chunks, check_finite=kind == "NaN")
        with pytest.raises((ldt.LdtError, TypeError, ValueError), match=WRONG[kind]):
            pipeline.step(uneven(0) if mesh.is_edge else None)


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_losses_are_refused_by_name(pool: RankPool, kind: str) -> None:
    """Each on all ranks: the mesh fails with the text of the rank of the chunk."""
    pool.run(wrong, kind, ranks=range(3))


class Declared(Penalized):
    """Needs no dry run, and says so."""

    auxiliary_losses = ("size",)

    def output_spec(self, *specs: Any) -> Any:
        return specs


def declared() -> None:
    topology = Topology([1, 1, 1])
    chunks = chunks_of(topology, plain=(0, 2, 3))
    torch.manual_seed(1)
    chunks[1] = Declared(16)
    model = Unsplit(chunks)
    total, means = objective(model, [uneven(0)], "mean")
    total.backward()
    with ldt.connect(topology, ranks=range(3)) as mesh:
        pipeline = build(mesh, chunks)
        result = pipeline.step(uneven(0) if mesh.is_edge else None)
        if mesh.is_edge:
            torch.testing.assert_close(result.auxiliary["size"], means["size"], check_dtype=False)
        for index in topology.chunks_of(mesh.stage):
            for got, wanted in zip(chunks[index].parameters(), model.chunks[index].parameters(), strict=True):
                torch.testing.assert_close(got.grad, wanted.grad)


def test_a_chunk_with_declared_outputs_declares_its_losses(pool: RankPool) -> None:
    pool.run(declared, ranks=range(3))


def test_outside_a_pipeline_the_gradient_is_that_of_the_loss() -> None:
    x = torch.randn(3, requires_grad=True)
    (ldt.add_loss(2 * x, x.square().sum(), "size", 0.5).sum()).backward()
    torch.testing.assert_close(x.grad, 2 + x)


def test_a_compiled_chunk() -> None:
    torch.manual_seed(0)
    chunk = Penalized(16)
    x = torch.randn(4, 16)
    chunk(x).sum().backward()
    expected = [parameter.grad for parameter in chunk.parameters()]
    chunk.zero_grad()
    torch.compile(chunk, backend="eager")(x).sum().backward()
    for parameter, wanted in zip(chunk.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)


class Keeping(Penalized):
    """Also keeps its input for the next chunk of its node."""

    keeps = True

    def forward(self, x: Tensor, *kept: Tensor) -> Any:
        for tensor in kept:
            x = x + tensor
        hidden = super().forward(x)
        return (hidden, ldt.keep(x)) if self.keeps else hidden


def keeping(split: bool) -> None:
    topology = Topology([1, 1], laps=2)
    torch.manual_seed(0)
    chunks = [Keeping(16, f"size {index % 2}") for index in range(topology.num_chunks)]
    for stage in range(2):
        chunks[topology.chunks_of(stage)[-1]].keeps = False
    reference = copy.deepcopy(chunks)
    batch = toy_microbatches(NUMBER)
    total, values = torch.zeros(()), torch.zeros(())
    for x, y in batch:
        kept: dict[int, Tensor] = {}
        for index, chunk in enumerate(reference):
            stage = topology.stage_of(index)
            x = x + kept[stage] if stage in kept else x  # noqa: PLW2901
            kept[stage] = x
            x = ToyChunk.forward(chunk, x)  # noqa: PLW2901
            loss = chunk.factor * x.square().mean()
            total = total + chunk.weight * loss / NUMBER
            values = values + (loss.detach() / NUMBER if index % 2 else 0)
        total = total + toy_loss(x, y) / NUMBER
    total.backward()
    costs = Costs(1.0, 2.0, weight=1.0 if split else None)
    plan = optimize(topology, NUMBER, costs, split_backward=split)
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks, plan=plan)
        result = pipeline.step(batch if mesh.is_edge else None)
        if mesh.is_edge:
            torch.testing.assert_close(result.auxiliary["size 1"], values, check_dtype=False)
        for index in topology.chunks_of(mesh.stage):
            for got, wanted in zip(chunks[index].parameters(), reference[index].parameters(), strict=True):
                torch.testing.assert_close(got.grad, wanted.grad)
        pipeline.validate(batch if mesh.is_edge else None)


@pytest.mark.parametrize("split", [False, True])
def test_beside_kept_tensors(pool: RankPool, split: bool) -> None:
    pool.run(keeping, split, ranks=range(2))
