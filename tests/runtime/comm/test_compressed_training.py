"""Compression in the ways a job trains: loss scaling, replicas, shared edges, laps, sites, evals, odd numbers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from compression_jobs import WIDTH, compare_with_rounding, reference_step
from pipeline_jobs import assert_equal_grads, assert_equal_losses, build
from torch import Tensor, nn

import ldt
from ldt.cli.compressed_costs import compressed
from ldt.plan import Costs, optimize
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.testing.rounding import with_rounding
from ldt.topology import Topology

WORLD_SIZE = 4
BOTH = pytest.mark.parametrize("choice", ["bf16", "8bit"])


# -- topologies and plans --------------------------------------------------------------------------------------------

TOPOLOGIES = {
    "two replicas": (Topology([1, 1], dp=2), 3),
    "a shared edge": (Topology([1, 1], dp=2, edge_dp=1), 2),  # a microbatch each, as sums then have one order
    "replicas and laps": (Topology([1, 1], dp=2, laps=2), 2),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_topologies(pool: RankPool, name: str) -> None:
    topology, number = TOPOLOGIES[name]
    pool.run(compare_with_rounding, topology, "8bit", number, ranks=range(topology.world_size))


def planned() -> None:
    topology = Topology([1, 1, 1])
    costs = Costs(0.01, 0.02, latency=0.05, bandwidth=1e6, bytes=1000)
    compare_with_rounding(topology, "8bit", 4, plan=optimize(topology, 4, costs))


def test_a_planned_order(pool: RankPool) -> None:
    pool.run(planned, ranks=range(3))


APART = Topology([1, 1, 1], sites=["office", "east", "west"])


@pytest.mark.parametrize(("choice", "most"), [("bf16", 0.51), ("8bit", 0.26)])
def test_bytes_on_the_wire_are_those_of_the_plan(pool: RankPool, choice: str, most: float) -> None:
    """Those that a step counts, against those that ``python -m ldt plan --compression`` plans with."""
    plain = 6 * WIDTH * 4
    planned = compressed(Costs(0.01, 0.02, bandwidth=1e6, bytes=plain), APART, choice, "float32")
    traffic = pool.run(compare_with_rounding, APART, choice, ranks=range(3))
    for channel in APART.channels:
        for messages, nbytes in (counts[channel.name] for counts in traffic if channel.name in counts):
            assert nbytes / messages == pytest.approx(planned.bytes[channel.hop], rel=0.01)
            assert nbytes / messages <= most * plain


def test_none_is_bit_equal_to_the_unsplit_model(pool: RankPool) -> None:
    pool.run(compare_with_rounding, Topology([1, 1]), {(0, 1): ldt.Compression()}, ranks=range(2))


@BOTH
def test_autocast(pool: RankPool, choice: str) -> None:
    pool.run(autocast, choice, ranks=range(3))


def autocast(choice: str) -> None:
    compare_with_rounding(Topology([1, 1, 1]), choice, autocast=True)


# -- evals -----------------------------------------------------------------------------------------------------------


class Various(ToyChunk):
    """With gradients it returns a table as well, which needs none; without, as many rows as there are columns."""

    def __init__(self, width: int, varies: bool) -> None:
        super().__init__(width)
        self.varies = varies

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        y = super().forward(x)
        if self.varies and not torch.is_grad_enabled():
            return y.repeat(2, 1)
        return y, torch.full((5,), 0.1)


def evaluated(frozen: bool, varies: bool) -> list[int]:
    """The bytes of an eval's messages, to the cloud and back."""
    topology = Topology([1, 1])
    torch.manual_seed(0)
    chunks: list[nn.Module] = [Various(WIDTH, varies), Various(WIDTH, False), ToyTail(WIDTH)]
    if frozen:
        chunks[0].requires_grad_(False)
    batch = toy_microbatches(2, WIDTH, batch=6)
    if varies:
        batch = [(x, target.repeat(2, 1)) for x, target in batch]
    with ldt.connect(topology, compression="8bit", ranks=range(2)) as mesh:
        result = build(mesh, chunks).eval(batch if mesh.is_edge else None)
    traffic = {channel.name: result.stats.channels[channel.name] for channel in topology.channels[::2]}
    return [nbytes // messages for messages, nbytes in traffic.values()]


class ToyTail(ToyChunk):
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return super().forward(x)


PACKED = 6 * WIDTH + 2 * 2


@pytest.mark.parametrize(
    ("frozen", "varies", "sizes"),
    [
        (False, False, [PACKED + 20, PACKED + 20]),
        (True, False, [6 * WIDTH * 4 + 20, PACKED + 20]),  # nothing of a frozen head would need a gradient
        (False, True, [12 * WIDTH * 4, 2 * 6 * WIDTH + 2 * 4 + 20]),  # other tensors than a step would have
    ],
)
def test_an_eval_packs_what_a_step_would_pack(
    pool: RankPool, frozen: bool, varies: bool, sizes: list[int]
) -> None:
    for found in pool.run(evaluated, frozen, varies, ranks=range(2)):
        assert found == sizes


def without_a_step() -> None:
    """An eval in inference mode, before any step."""
    topology = Topology([1, 1])
    chunks = toy_chunks(topology, WIDTH)
    batch = toy_microbatches(2, WIDTH, batch=6)
    losses, _ = reference_step(topology, chunks, [batch], "8bit")
    with ldt.connect(topology, compression="8bit", ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks)
        pipeline.validate(batch if mesh.is_edge else None)
        with torch.inference_mode():
            result = pipeline.eval(batch if mesh.is_edge else None)
        if mesh.is_edge:
            assert_equal_losses(result, losses[0])


def test_an_eval_in_inference_mode(pool: RankPool) -> None:
    pool.run(without_a_step, ranks=range(2))


# -- several steps ---------------------------------------------------------------------------------------------------


def announced() -> None:
    topology = Topology([1, 1, 1])
    chunks = toy_chunks(topology, WIDTH)
    batches = [toy_microbatches(2, WIDTH, batch=rows, seed=rows) for rows in (4, 6, 5)]
    with ldt.connect(topology, compression="8bit", ranks=range(3)) as mesh:
        pipeline = build(mesh, chunks)
        for batch, following in zip(batches, [*batches[1:], None], strict=True):
            losses, reference = reference_step(topology, chunks, [batch], "8bit")
            options = {"upcoming": following} if mesh.is_edge else {}
            result = pipeline.step(batch if mesh.is_edge else None, **options)
            if mesh.is_edge:
                assert_equal_losses(result, losses[0])
            assert_equal_grads(mesh, chunks, reference)
            for chunk in chunks:
                chunk.zero_grad()


def test_steps_that_are_announced(pool: RankPool) -> None:
    pool.run(announced, ranks=range(3))


class Half(ToyChunk):
    """Its boundaries are float16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).half()


class HalfTail(ToyChunk):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


SCALING: dict[str, Any] = {"init_scale": 2.0**40, "backoff_factor": 2.0**-13, "growth_interval": 100}


def scale_unsplit(topology: Topology, chunks: list[nn.Module], batch: list[Any], choice: str) -> list[Any]:
    """Each step's scale, and the modules after the last."""
    model = copy.deepcopy(nn.ModuleList(with_rounding(topology, chunks, choice)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", **SCALING)
    scales = []
    for _ in range(6):
        optimizer.zero_grad()
        for inputs, target in batch:
            loss = toy_loss(nn.Sequential(*model)(inputs), target)
            scaler.scale(loss / len(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [scales, list(model)]


def scaled(choice: str) -> list[float]:
    topology = Topology([1, 1])
    torch.manual_seed(0)
    chunks: list[nn.Module] = [Half(WIDTH), Half(WIDTH), HalfTail(WIDTH)]
    batch = toy_microbatches(2, WIDTH, batch=6)
    expected, reference = scale_unsplit(topology, chunks, batch, choice)
    scales = []
    with ldt.connect(topology, compression=choice, ranks=range(2)) as mesh:  # type: ignore[arg-type]
        scaler = ldt.GradScaler(mesh, **SCALING)
        pipeline = build(mesh, chunks, grad_scaler=scaler)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        for _ in range(6):
            optimizer.zero_grad()
            pipeline.step(batch if mesh.is_edge else None)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == expected
        for index in topology.chunks_of(mesh.stage):
            pairs = zip(chunks[index].parameters(), reference[index].parameters(), strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    return scales


@BOTH
def test_a_gradient_that_overflows_skips_the_step_on_all_ranks(pool: RankPool, choice: str) -> None:
    scales, others = pool.run(scaled, choice, ranks=range(2))
    assert others == scales
    assert scales[0] == 2.0**27, "the first step did not overflow"
    assert scales[-2] == scales[-1], "no step went without overflow"


# -- odd numbers -----------------------------------------------------------------------------------------------------


def tiny_loss(output: Tensor, target: Tensor) -> Tensor:
    return toy_loss(output, target) * 1e-6


def tiny(choice: str) -> float:
    """The largest error of a parameter's gradient, by its norm."""
    topology = Topology([1, 1, 1])
    compare_with_rounding(topology, choice, loss_fn=tiny_loss)
    chunks = toy_chunks(topology, WIDTH)
    batch = toy_microbatches(3, WIDTH, batch=6, seed=0)
    _, rounded = reference_step(topology, chunks, [batch], choice, tiny_loss)
    _, plain = unsplit_step(chunks, batch, tiny_loss)
    errors = []
    for mine, theirs in zip(rounded, plain, strict=True):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert other.grad.abs().max() < 1e-6
            errors.append(float((one.grad - other.grad).norm() / other.grad.norm()))
    return max(errors)


@pytest.mark.parametrize(("choice", "most"), [("bf16", 0.02), ("8bit", 0.15)])
def test_gradients_around_1e_8(pool: RankPool, choice: str, most: float) -> None:
    assert max(pool.run(tiny, choice, ranks=range(3))) < most


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(1, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def dot(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def infinite(choice: str) -> None:
    topology = Topology([1, 1, 1])
    chunks: list[nn.Module] = [Scale() for _ in range(4)]
    x, target = torch.ones(6, WIDTH), torch.ones(6, WIDTH)
    x[0, 3], x[1, 5], x[2, 7] = math.inf, -math.inf, math.nan
    target[3, 9], target[4, 11] = math.inf, math.nan
    _, reference = reference_step(topology, chunks, [[(x, target)]], choice, dot)
    with ldt.connect(topology, compression=choice, ranks=range(3)) as mesh:  # type: ignore[arg-type]
        build(mesh, chunks, dot).step([(x, target)] if mesh.is_edge else None)
        for index in topology.chunks_of(mesh.stage):
            grad, expected = (next(m[index].parameters()).grad for m in (chunks, reference))
            assert grad is not None
            torch.testing.assert_close(grad, expected, rtol=0, atol=0, equal_nan=True)
            assert [float(grad[i]) for i in (3, 5, 9)] == [math.inf, -math.inf, math.inf]
            assert grad.isnan().nonzero().flatten().tolist() == [7, 11]


@BOTH
def test_infinities_and_nan_arrive_as_such(pool: RankPool, choice: str) -> None:
    pool.run(infinite, choice, ranks=range(3))
