"""Models of odd kinds, as those that other pipelines are tested with, equal the unsplit model bit for bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_jobs import assert_equal_grads, assert_equal_losses, build
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ldt
from ldt.plan import Costs, Plan, optimize, verify
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 4


def compare(
    topology: Topology,
    chunks: Sequence[nn.Module],
    batch: Sequence[tuple[Any, Any]],
    loss_fn: Any = toy_loss,
    plan: Plan | None = None,
    steps: int = 2,
    **options: Any,
) -> ldt.StepResult:
    """Train some steps with and without pipeline, each from zero gradients. Returns the last result."""
    losses, reference = unsplit_step(chunks, copy.deepcopy(list(batch)), loss_fn)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks, loss_fn, plan=plan, **options)
        for _ in range(steps):
            for chunk in chunks:
                chunk.zero_grad()
            result = pipeline.step(batch if mesh.is_edge else None)
            if mesh.is_edge:
                assert_equal_losses(result, losses)
            assert_equal_grads(mesh, chunks, reference)
        return result


def split(topology: Topology, number: int) -> Plan:
    return optimize(topology, number, Costs(1.0, 2.0, weight=1.0), split_backward=True)


class _Scaled(torch.autograd.Function):
    """Keeps a text under the name that the node's own method has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, word: str) -> Tensor:
        ctx.name = word
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        assert ctx.name == "named"
        return 2 * grad, None


class NamesItsContext(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.linear, self.checkpointed = nn.Linear(16, 16), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self._run, x, use_reentrant=True) if self.checkpointed else self._run(x)
        return result

    def _run(self, x: Tensor) -> Tensor:
        scaled: Tensor = _Scaled.apply(torch.tanh(self.linear(x)), "named")  # type: ignore[no-untyped-call]
        return scaled


def named_context(kind: str) -> None:
    torch.manual_seed(0)
    topology = Topology([1, 1])
    chunks = [NamesItsContext(kind == "checkpointed" and index > 0) for index in range(3)]
    compare(topology, chunks, toy_microbatches(2), plan=split(topology, 2) if kind == "split" else None)


@pytest.mark.parametrize("kind", ["whole", "split", "checkpointed"])
def test_a_function_may_hide_the_name_of_its_node(pool: RankPool, kind: str) -> None:
    pool.run(named_context, kind, ranks=range(2))


def token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = target[:, 0] > 0
    return ((output - target).square().mean(-1) * kept).sum(), kept.sum()


def without_tokens(empty: Sequence[int]) -> list[float]:
    topology = Topology([1, 1])
    batch = [(x, -y.abs() if m in empty else y.abs()) for m, (x, y) in enumerate(toy_microbatches(2))]
    chunks = toy_chunks(topology)
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks, token_loss, loss_reduction="token")
        result = pipeline.step(batch if mesh.is_edge else None)
        for parameter in pipeline.parameters():
            assert parameter.grad is not None
            assert torch.isfinite(parameter.grad).all()
            assert bool(parameter.grad.any()) == (len(empty) < 2)
        if not mesh.is_edge:
            return []
        assert result.loss is not None
        return [float(result.loss), *map(float, result.losses or ())]


def test_a_loss_without_tokens_is_zero(pool: RankPool) -> None:
    assert pool.run(without_tokens, (0, 1), ranks=range(2))[0] == [0.0, 0.0, 0.0]
    total, first, second = pool.run(without_tokens, (0,), ranks=range(2))[0]
    assert first == 0.0
    assert total == second > 0.0


LAYERS = 15


def alexnet(checkpointed: bool) -> list[nn.Module]:
    """The convolutional net that DeepSpeed trains, layer by layer, for images of 32 x 32."""
    inplace = not checkpointed
    relu = [nn.ReLU(inplace=inplace) for _ in range(5)]
    layers = [
        nn.Conv2d(3, 8, 11, stride=4, padding=5), relu[0], nn.MaxPool2d(2, 2),
        nn.Conv2d(8, 12, 5, padding=2), relu[1], nn.MaxPool2d(2, 2),
        nn.Conv2d(12, 16, 3, padding=1), relu[2], nn.Conv2d(16, 16, 3, padding=1), relu[3],
        nn.Conv2d(16, 16, 3, padding=1), relu[4], nn.MaxPool2d(2, 2), nn.Flatten(), nn.Linear(16, 10),
    ]  # fmt: skip
    assert len(layers) == LAYERS
    return layers


class Cut(nn.Sequential):
    checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def images(tp: list[int], cuts: Sequence[int], checkpointed: bool) -> None:
    torch.manual_seed(0)
    layers = alexnet(checkpointed)
    chunks = [Cut(*layers[start:stop]) for start, stop in pairwise(cuts)]
    for chunk in chunks:
        chunk.checkpointed = checkpointed
    batch = [(torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))) for _ in range(2)]
    compare(Topology(tp), chunks, batch, nn.functional.cross_entropy)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("tp", "cuts"), [([1], (0, 8, 15)), ([1, 1, 1], (0, 4, 8, 11, 15)), ([1, 1, 1], (0, 5, 9, 12, 15))]
)
def test_a_convolutional_net(pool: RankPool, tp: list[int], cuts: Sequence[int], checkpointed: bool) -> None:
    """Cut anywhere, also between a layer and a ReLU in place; a chunk may have no parameters."""
    pool.run(images, tp, cuts, checkpointed, ranks=range(len(tp)))


class Scale(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def of_inputs() -> None:
    """As in the test of torch: the gradients of x and of its scale are 18 and 6."""
    topology = Topology([1, 1])
    x, scale = torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    batch = [((part, scale), torch.zeros(1)) for part in x.chunk(2)]
    with ldt.connect(topology, ranks=range(2)) as mesh:
        chunks = [Scale(), nn.Identity(), nn.Identity()]
        pipeline = build(mesh, chunks, squares, loss_reduction="sum")
        pipeline.step(batch if mesh.is_edge else None)
        if mesh.is_edge:
            assert x.grad is not None
            assert scale.grad is not None
            assert x.grad.tolist() == [18.0, 18.0]
            assert float(scale.grad) == 2 * 2 * 3.0


def test_inputs_may_require_a_gradient(pool: RankPool) -> None:
    pool.run(of_inputs, ranks=range(2))


def saved(folder: str) -> None:
    """A V: two steps, a save, and a pipeline with other weights that loads it."""
    topology = Topology([1, 1], placement=[0, 1, 1, 0])
    plan = split(topology, 5)
    trained, fresh = toy_chunks(topology), toy_chunks(topology, seed=7)
    with ldt.connect(topology, ranks=range(2)) as mesh:
        batch = toy_microbatches(5) if mesh.is_edge else None
        pipeline = build(mesh, trained, plan=plan)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            optimizer.zero_grad()
            pipeline.step(batch)
            optimizer.step()
            ldt.save_checkpoint(folder, pipeline, optimizer, step=step)
        other = build(mesh, fresh, plan=plan)
        again = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        loaded = ldt.load_checkpoint(folder, other, again)
        assert loaded is not None
        assert loaded.step == 1
        for index in topology.chunks_of(mesh.stage):
            for mine, theirs in zip(fresh[index].parameters(), trained[index].parameters(), strict=True):
                assert torch.equal(mine, theirs)


def test_a_v_is_saved_and_loaded(pool: RankPool, tmp_path: Path) -> None:
    pool.run(saved, str(tmp_path), ranks=range(2))


ROWS = [
    ([0, 0, 1, 1, 0], 1, {0: "0F0,1F0,4F0,4B0,1B0,0B0", 1: "2F0,3F0,3B0,2B0"}),
    (
        [0, 1, 0, 1, 0],
        2,
        {
            0: "0F0,0F1,2F0,2F1,4F0,4I0,4F1,4I1,2I0,2W0,0I0,2I1,4W0,0W0,0I1,2W1,4W1,0W1",
            1: "1F0,1F1,3F0,3F1,3I0,1I0,3I1,3W0,1I1,1W0,3W1,1W1",
        },
    ),
    (
        [0, 1, 1, 0],
        2,
        {
            0: "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,0I1,3W1,0W0,0W1",
            1: "1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,2W1,1W0,1W1",
        },
    ),
]


def by_rows(placement: list[int], number: int, rows: dict[int, str]) -> None:
    topology = Topology([1, 1], placement=placement)
    plan = ldt.plan.from_csv("\n".join(rows.values()), topology)
    verify(plan)
    compare(topology, toy_chunks(topology), toy_microbatches(number), plan=plan)


@pytest.mark.parametrize(("placement", "number", "rows"), ROWS, ids=["unbalanced", "interleaved", "V"])
def test_plans_given_as_rows(pool: RankPool, placement: list[int], number: int, rows: dict[int, str]) -> None:
    pool.run(by_rows, placement, number, rows, ranks=range(2))


def cycles(topology: Topology, planned: bool) -> list[str]:
    chunks = toy_chunks(topology)
    plan = split(topology, 4) if planned or not topology.is_looped else None
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks, plan=plan)
        found = []
        for _ in range(2):
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                pipeline.step(toy_microbatches(4) if mesh.is_edge else None)
                gc.collect()
            finally:
                gc.set_debug(0)
            found += [type(one).__name__ for one in gc.garbage if isinstance(one, Tensor)]
            gc.garbage.clear()
        return found


@pytest.mark.parametrize(
    ("topology", "planned"),
    [
        (Topology([1, 1]), False),
        (Topology([1, 1], laps=2), True),
        (Topology([1, 1], placement=[0, 1, 1, 0]), True),
    ],
    ids=str,
)
def test_no_tensor_is_left_in_a_reference_cycle(pool: RankPool, topology: Topology, planned: bool) -> None:
    assert pool.run(cycles, topology, planned, ranks=range(2)) == [[], []]
