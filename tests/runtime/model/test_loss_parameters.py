"""Tests that parameters of a loss function train as in the unsplit model: scaled, averaged, clipped and saved."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn

import ldt
from ldt.plan import Costs, optimize
from ldt.runtime.model.loss_module import loss_module
from ldt.testing import RankPool, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4
_kept: list[nn.Module] = []


class Weighted(nn.Module):
    """The weighted sum of squares with the number of elements, or the mean."""

    def __init__(self, token: bool = False) -> None:
        super().__init__()
        self.w, self.unused, self.token = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3)), token
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, output: Tensor, target: Tensor) -> Any:
        self.calls += 1
        squares = self.w * (output - target).square()
        return (squares.sum(), squares.numel()) if self.token else squares.mean()


class Holder:
    """Is called as an object, or by its method; its other attributes do not belong to the loss."""

    def __init__(self, inner: nn.Module) -> None:
        self.inner, self.other = inner, nn.Linear(3, 3)

    def __call__(self, output: Tensor, target: Tensor) -> Any:
        return self.compute(output, target)

    def compute(self, output: Tensor, target: Tensor) -> Any:
        return self.inner(output, target)


def _free(output: Tensor, target: Tensor) -> Any:
    return _kept[0](output, target)


def _by_keyword(output: Tensor, target: Tensor, *, using: nn.Module) -> Any:
    return using(output, target)


WAYS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "module": lambda module: module,
    "partial": lambda module: functools.partial(_by_keyword, using=module),
    "bound method": lambda module: Holder(module).compute,
    "forward of a module": lambda module: module.forward,
    "object": Holder,
    "object of a derived class": type("Derived", (Holder,), {}),
    "closure": lambda module: lambda output, target: module(output, target) * 1,
    "global": lambda module: _free,
}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_found(way: str) -> None:
    module = Weighted()
    _kept[:] = [module]
    found = loss_module(WAYS[way](module))
    assert found is not None
    assert [id(p) for p in found.parameters()] == [id(module.w), id(module.unused)]


class Model(nn.Module):
    """A model whose config a loss reads, or whose head it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.scale = nn.Linear(3, 3), nn.Linear(3, 3), nn.Parameter(torch.ones(3))
        self.config = SimpleNamespace(vocab_size=3, inner=SimpleNamespace(head=None))
        self.parts = SimpleNamespace(heads=[self.head])

    @property
    def temperature(self) -> Tensor:
        return self.scale.exp()

    def score(self, output: Tensor) -> Any:
        return self.head(output).sum()


model = Model()


class Reading:
    def __init__(self, held: Model) -> None:
        self.held = held

    def __call__(self, output: Tensor, target: Tensor) -> Any:
        return output.sum() * self.held.config.vocab_size if self.held.training else output.sum()


def _given(output: Tensor, target: Tensor, held: Model) -> Any:
    return output.sum() * held.config.vocab_size


def _by_default(output: Tensor, target: Tensor, held: Model = model) -> Any:
    return output.view(-1, held.config.vocab_size).to(held.scale.dtype).sum() * len(held.scale.shape)


def _within(output: Tensor, target: Tensor) -> Any:
    return sum(part.sum() for part in output if model.training and model.config.vocab_size)


def _inner(output: Tensor, target: Tensor) -> Any:
    config = model.config
    return output.sum() * config.vocab_size


READERS: dict[str, tuple[Callable[..., Any], Sequence[str]]] = {
    "config of a global": (lambda o, t: o.view(-1, model.config.vocab_size).sum() * model.training, ()),
    "config of a closure": ((lambda m: lambda o, t: o.sum() * m.config.vocab_size)(model), ()),
    "config by a keyword": (functools.partial(_given, held=model), ()),
    "config by position": (functools.partial(lambda m, o, t: o.sum() * m.config.vocab_size, model), ()),
    "config by a default": (_by_default, ()),
    "config by an attribute": (Reading(model), ()),
    "config in a comprehension": (_within, ()),
    "config by another name": (_inner, ()),
    "a layer": (lambda o, t: model.head(o).sum() * model.config.vocab_size, ("head",)),
    "layers in an object": (lambda o, t: model.parts.heads[0](o).sum(), ("head",)),
    "a parameter": (lambda o, t: (model.scale.square() * o).sum(), ("scale",)),
    "a view of a parameter": (lambda o, t: (o @ model.head.weight.T).sum(), ("head.weight",)),
    "a method": (lambda o, t: model.score(o), ("body", "head", "scale")),
    "a property": (lambda o, t: (o * model.temperature).sum(), ("body", "head", "scale")),
    "all": (lambda o, t: _given(o, t, model) + model.training, ("body", "head", "scale")),
}


@pytest.mark.parametrize("way", READERS)
def test_a_model_whose_config_is_read_is_not_trained(way: str) -> None:
    loss_fn, names = READERS[way]
    found = loss_module(loss_fn)
    wanted = {id(p) for name, p in model.named_parameters() if name.startswith(tuple(names)) and names}
    assert {id(p) for p in ([] if found is None else found.parameters())} == wanted


def test_a_function_of_torch_trains_nothing() -> None:
    assert loss_module(nn.functional.cross_entropy) is None
    assert loss_module(nn.CrossEntropyLoss()) is None
    assert loss_module(None) is None


def unsplit(chunks: Sequence[nn.Module], loss: Weighted, batches: Sequence[Any]) -> nn.ModuleList:
    """Compute the gradients of the mean over all tokens, or over the microbatches of all replicas."""
    model = copy.deepcopy(nn.ModuleList([*chunks, loss]))
    *layers, criterion = model
    every = [pair for batch in batches for pair in batch]
    count = sum(target.numel() for _, target in every)
    for inputs, target in every:
        found = criterion(nn.Sequential(*layers)(inputs), target)
        (found[0] / count if loss.token else found / len(every)).backward()
    return model


def trained(tp: list[int], dp: int, token: bool, split: bool, finite: bool) -> float:
    topology = Topology(tp, dp=dp)
    chunks, loss = toy_chunks(topology), Weighted(token)
    batches = [toy_microbatches(3, seed=seed) for seed in range(dp)]
    reference = unsplit(chunks, loss, batches)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e-2)
    plan = optimize(topology, 3, Costs(1, 2, latency=1), split_backward=True) if split else None
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        options: Any = {"loss_reduction": "token" if token else "mean", "check_finite": finite}
        pipeline = build(mesh, chunks, loss, plan=plan, **options)
        assert any(p is loss.w for p in pipeline.parameters()) == mesh.is_edge
        pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
        norm = ldt.clip_grad_norm_(pipeline.parameters(), 1e-2, mesh)
        torch.testing.assert_close(norm, expected)
        if mesh.is_edge:
            torch.testing.assert_close(loss.w.grad, reference[-1].w.grad)  # type: ignore[union-attr]
            assert loss.unused.grad is None
        return norm.item()


@pytest.mark.parametrize(
    ("tp", "dp", "token", "split", "finite"),
    [
        ([1, 1], 1, True, False, False),
        ([1, 1], 1, False, True, True),
        ([1, 1], 2, True, False, False),
        ([1, 1], 2, False, False, True),
        ([2, 1], 1, True, True, False),
        ([1], 1, True, False, False),
    ],
)
def test_gradients_are_those_of_the_unsplit_model(
    pool: RankPool, tp: list[int], dp: int, token: bool, split: bool, finite: bool
) -> None:
    norms = pool.run(trained, tp, dp, token, split, finite, ranks=range(sum(tp) * dp))
    assert len(set(norms)) == 1


def refused(reduction: Any) -> str:
    """Use a trained tensor that belongs to no module; a mean on one replica does not change its gradient."""
    topology = Topology([1, 1])
    w = torch.tensor(2.0, requires_grad=True)

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        loss = w * (output - target).square().sum()
        return loss if reduction == "mean" else (loss, target.numel())

    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, toy_chunks(topology), loss_fn, loss_reduction=reduction)
        try:
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        except ldt.LdtError as error:
            return str(error)
        assert w.grad is not None or not mesh.is_edge
        return ""


def test_a_trained_tensor_that_is_not_found_is_refused(pool: RankPool) -> None:
    for text in pool.run(refused, "token", ranks=range(2)):
        assert "loss_fn uses a tensor of shape [] that requires a gradient" in text
        assert "make it a parameter of an nn.Module" in text
    assert pool.run(refused, "mean", ranks=range(2)) == ["", ""]


def unlike() -> str:
    """Give edge replicas different weights in the loss."""
    topology = Topology([1, 1], dp=2)
    with ldt.connect(topology) as mesh:
        loss = Weighted()
        nn.init.constant_(loss.w, mesh.replica)
        with pytest.raises(ldt.LdtError) as caught:
            build(mesh, toy_chunks(topology), loss)
        return str(caught.value)


def test_replicas_of_a_loss_begin_equal(pool: RankPool) -> None:
    for text in pool.run(unlike):
        assert "w of loss_fn differs between rank 0 and ranks [1] of stage 0" in text


def saved(path: Path) -> None:
    """Save and load weights, buffers and optimizer states of the loss in the edge's checkpoint."""
    topology = Topology([1, 1])
    batch = toy_microbatches(2)
    made = []
    with ldt.connect(topology, ranks=range(2)) as mesh:
        for _ in range(2):
            chunks, loss = toy_chunks(topology), Weighted(token=True)
            pipeline = build(mesh, chunks, loss, loss_reduction="token")
            made.append((pipeline, torch.optim.AdamW(pipeline.parameters(), lr=0.1), loss))
        (first, optimizer, loss), (second, other, restored) = made
        for _ in range(2):
            first.step(batch if mesh.is_edge else None)
            optimizer.step()
            optimizer.zero_grad()
        ldt.save_checkpoint(path, first, optimizer, step=1)
        assert ldt.load_checkpoint(path, second, other) is not None
        if mesh.is_edge:
            assert loss.w != 2
            assert restored.calls == 4
        for pipeline, optimizer, _ in made:
            pipeline.step(batch if mesh.is_edge else None)
            optimizer.step()
        assert torch.equal(loss.w, restored.w)


def test_a_loss_is_saved_and_loaded(pool: RankPool, tmp_path: Path) -> None:
    pool.run(saved, tmp_path, ranks=range(2))


class Emits(nn.Module):
    """Returns its input and some rows of it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 2 * x[: self.rows]


class Cuts(nn.Module):
    """Detaches the output that the loss uses, not the one that it ignores."""

    def forward(self, x: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        return x.detach() + 0.1, more


class OfTheFirst(Weighted):
    def forward(self, output: tuple[Tensor, Tensor], target: Tensor) -> Any:
        return super().forward(output[0], target)


def cut_off(rows: int) -> None:
    topology = Topology([1, 1])
    torch.manual_seed(0)
    chunks, loss = [nn.Linear(16, 16), Emits(rows), Cuts()], OfTheFirst()
    batch = [(torch.randn(3, 16), torch.randn(3, 16)) for _ in range(2)]
    whole = copy.deepcopy(nn.ModuleList([*chunks, loss]))
    for x, target in batch:
        (whole[3](whole[2](*whole[1](whole[0](x))), target) / 2).backward()
    with ldt.connect(topology, ranks=[0, 1]) as mesh:
        pipeline = build(mesh, chunks, loss_fn=loss)
        pipeline.step(batch if mesh.is_edge else None)
    if mesh.is_edge:
        assert torch.equal(loss.w.grad, whole[3].w.grad)
        assert [p.grad for p in whole[0].parameters()] == [None, None]
        assert [p.grad for p in chunks[0].parameters()] == [None, None]


@pytest.mark.parametrize("rows", [0, 2])
def test_a_loss_that_uses_only_a_detached_output(pool: RankPool, rows: int) -> None:
    pool.run(cut_off, rows, ranks=[0, 1])
