"""Tests that a weight on two stages, or a tie that was split into two tensors, is refused."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ldt
from ldt.runtime import TensorSpec
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4


class Named(nn.Module):
    """A chunk that provides its names in the whole model."""

    def __init__(self, inner: nn.Module, first: int) -> None:
        super().__init__()
        self.inner, self.first = inner, first

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]

    def whole_model_name(self, name: str) -> str:
        return f"layers.{self.first}.{name.removeprefix('inner.')}"


class Scaled(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.linear = weight, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.weight)  # type: ignore[no-any-return]


def compiled(module: nn.Module) -> nn.Module:
    """Return the module after compiling it elsewhere, too."""
    _kept.append(torch.compile(module))  # type: ignore[arg-type]
    return module


class Frozen(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = copy.deepcopy(inner).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class Repeating(nn.Module):
    """Begins equal to others of its kind except for its matrix; may have two copies of a previous chunk's layer."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.arange(1.0, 17).repeat(4, 1))
        self.matrix, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        if layer is not None:
            self.copies = nn.ModuleList([copy.deepcopy(layer), copy.deepcopy(layer)])

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix(self.norm(x))  # type: ignore[no-any-return]


class Formulas(nn.Module):
    """Has parameters computed by formulas, besides random ones."""

    def __init__(self) -> None:
        super().__init__()
        self.log, self.steps = (
            nn.Parameter(torch.log(torch.arange(1.0, 17))),
            nn.Parameter(torch.arange(16.0)),
        )
        self.even, self.table = nn.Parameter(torch.linspace(-1, 1, 16)), nn.Parameter(torch.arange(256.0))
        self.unit, self.matrix = nn.Parameter(torch.eye(16)), nn.Linear(16, 16)
        self.waves = nn.Parameter(torch.outer(torch.arange(16.0), 0.01 ** torch.linspace(0, 1, 16)).sin())

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.unit) @ (self.table.view(16, 16) / 256 + self.waves)
        return self.matrix(torch.tanh(x * self.log + self.steps * self.even))  # type: ignore[no-any-return]


def layers(number: int) -> list[nn.Module]:
    return list(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0), number).layers)


class Secretive(nn.Module):
    def parameters(self, recurse: bool = True) -> Any:
        raise RuntimeError("not yet")


_kept: list[nn.Module] = []  # what a script keeps besides the model, such as averages of its weights


def shared(case: str) -> list[nn.Module]:
    """Return the chunks of three stages, some of which share weights; equal on every rank."""
    torch.manual_seed(0)
    layer, block, weight = nn.Linear(16, 16), ToyChunk(16), nn.Parameter(torch.randn(16))
    chunks: dict[str, list[nn.Module]] = {
        "a module": [layer, layer, ToyChunk(16), ToyChunk(16)],
        "a block": [nn.Tanh(), block, block, nn.Tanh()],
        "a wrapped block": [nn.Tanh(), nn.Sequential(block), nn.Sequential(block), nn.Tanh()],
        "inside": [nn.Sequential(nn.Tanh(), layer), nn.Sequential(layer, ToyChunk(16)), nn.Tanh(), nn.Tanh()],
        "a vector": [Scaled(weight), Scaled(weight), ToyChunk(16), ToyChunk(16)],
        "on the cloud": [ToyChunk(16), layer, nn.Sequential(layer), ToyChunk(16)],
        "with the tail": [ToyChunk(16), layer, ToyChunk(16), layer],
        "a name": [Named(nn.Linear(16, 16), 0), Named(nn.Linear(16, 16), 0), nn.Tanh(), nn.Tanh()],
        "frozen": [Frozen(layer), Frozen(layer), ToyChunk(16), ToyChunk(16)],
        "formulas": [Formulas() for _ in range(4)],
        "an encoder": layers(4),
        "an encoder inside": [nn.Linear(16, 16), *map(nn.Sequential, layers(2)), nn.Linear(16, 16)],
        "compiled": [compiled(one) for one in layers(4)],
        "copies of a layer": [copy.deepcopy(layer) for _ in range(4)],
        "copies with names": [Named(copy.deepcopy(layer), index) for index in range(4)],
        "a vector with names": [Named(Scaled(nn.Parameter(weight.detach().clone())), i) for i in range(4)],
        "repeating": [Repeating(), Repeating(), Repeating(), Repeating()],
        "copies": [nn.Linear(16, 16), Repeating(layer), nn.Sequential(layer), ToyChunk(16)],
        "names": [Named(nn.Linear(16, 16), index) for index in range(4)],
    }
    _kept[:] = [copy.deepcopy(nn.ModuleList(chunks[case])), Secretive()]
    return chunks[case]


def building(case: str, **options: Any) -> str:
    """Return the error of ``Pipeline`` on three stages; the mesh stays usable."""
    topology = Topology([1, 1, 1])
    with ldt.connect(topology, ranks=range(3)) as mesh:
        try:
            build(mesh, shared(case), **options)
        except ldt.LdtError as error:
            same = toy_chunks(topology)
            build(mesh, same).step(toy_microbatches(2) if mesh.is_edge else None)
            return str(error)
    return ""


def unchecked(case: str) -> str:
    return building(case, check_weights=False) + building(case, check_weights=False, sync_weights=True)


def building_allowed(case: str) -> str:
    return building(case, allow_equal_weights=True)


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("a module", "weight of chunk 0 (float32[16, 16]", "weight of chunk 1 (float32[16, 16]"),
        ("inside", "1.weight of chunk 0", "0.weight of chunk 1"),
        ("a vector", "weight of chunk 0 (float32[16]", "weight of chunk 1 (float32[16]"),
        ("on the cloud", "weight of chunk 1", "0.weight of chunk 2"),
        ("with the tail", "weight of chunk 3", "weight of chunk 1"),
        ("a block", "first.weight of chunk 1", "first.weight of chunk 2"),
        ("a wrapped block", "0.first.weight of chunk 1", "0.first.weight of chunk 2"),
    ],
)
def test_a_parameter_on_two_stages(pool: RankPool, case: str, first: str, second: str) -> None:
    texts = pool.run(building, case, ranks=range(3))
    assert len(set(texts)) == 1
    for part in (first, second, "two stages hold it", "allow_equal_weights=True"):
        assert part in texts[0]
    assert pool.run(building_allowed, case, ranks=range(3)) == [""] * 3


def test_a_name_on_two_stages(pool: RankPool) -> None:
    """It is refused whatever the values are."""
    for text in pool.run(building_allowed, "a name", ranks=range(3)):
        assert (
            "inner.weight of chunk 0 (float32[16, 16], requires a gradient) on stage 0 and inner.weight"
            in text
        )
        assert "are one weight of the model: two stages hold it" in text
    assert pool.run(unchecked, "a name", ranks=range(3)) == [""] * 3


MAY_BEGIN_EQUAL = (
    *("frozen", "repeating", "copies", "names", "formulas", "an encoder", "an encoder inside", "compiled"),
    *("copies of a layer", "copies with names", "a vector with names"),
)


def warnings_of(case: str, alone: bool) -> int:
    """Count the warnings of Pipeline. With ``alone`` a process keeps only its chunks of the model."""
    topology, records = Topology([1, 1, 1]), []  # type: ignore[var-annotated]
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("ldt.runtime.model.ties").addHandler(handler)
    with ldt.connect(topology, ranks=range(3)) as mesh:
        chunks: Any = shared(case)
        if alone:
            _kept.clear()
            chunks = [
                chunk if i in topology.chunks_of(mesh.stage) else None for i, chunk in enumerate(chunks)
            ]
        build(mesh, chunks)
    logging.getLogger("ldt.runtime.model.ties").removeHandler(handler)
    return len(records)


@pytest.mark.parametrize("alone", [False, True])
def test_what_may_begin_equal(pool: RankPool, alone: bool) -> None:
    """Frozen layers, computed parameters, and copies of layers, which the rank with the first copy logs."""
    for case in MAY_BEGIN_EQUAL:
        warned = sum(pool.run(warnings_of, case, alone, ranks=range(3)))
        assert warned == 0 or "names" not in case, case
        assert warned > 0 or case not in ("an encoder", "an encoder inside", "copies of a layer"), case


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.linear = weight, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(nn.functional.linear(x, self.weight)))  # type: ignore[no-any-return]

    def output_spec(self, inputs: TensorSpec) -> TensorSpec:
        return TensorSpec(inputs.shape, inputs.dtype, requires_grad=True)


def broken(how: str) -> str:
    """The edge's two chunks share a weight, until ``how`` splits it into two tensors."""
    topology = Topology([2, 1]) if how == "parallelize_module" else Topology([1, 1], dp=2)
    torch.manual_seed(0)
    embedding = nn.Embedding(16, 16, padding_idx=0)
    head, tail = Tied(embedding.weight), Tied(embedding.weight)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        chunks: list[nn.Module] = [head, ToyChunk(16), tail]
        if how == "both" and mesh.is_edge:
            fully_shard(head, mesh=mesh.dp_mesh)
        if how in ("both", "one") and mesh.is_edge:
            fully_shard(tail, mesh=mesh.dp_mesh)
        if how == "a copy":
            chunks[2] = copy.deepcopy(tail)
        if how == "parallelize_module" and mesh.is_edge:
            tail.head = nn.Linear(16, 16, bias=False)
            tail.head.weight = embedding.weight
            del tail.weight
            parallelize_module(tail, mesh.tp_mesh, {"head": ColwiseParallel()})
        try:
            build(mesh, chunks)
        except ldt.LdtError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("how", ["both", "one", "a copy", "parallelize_module"])
def test_a_tie_that_was_broken(pool: RankPool, how: str) -> None:
    size = 3 if how == "parallelize_module" else 4
    for text in pool.run(broken, how, ranks=range(size)):
        name = "head.weight" if how == "parallelize_module" else "weight"
        assert "weight of chunk 0 (float32[16, 16]" in text
        assert f"{name} of chunk 2 (float32[16, 16]" in text
        assert "fully_shard, parallelize_module or a copy split it into two tensors" in text


def test_a_tie_may_stay(pool: RankPool) -> None:
    assert pool.run(broken, "no") == [""] * 4


def thawed(allowed: bool) -> str:
    layer = nn.Linear(16, 16).requires_grad_(False)
    chunks = [layer, layer, ToyChunk(16), ToyChunk(16)]
    with ldt.connect(Topology([1, 1, 1]), ranks=range(3)) as mesh:
        pipeline = build(mesh, chunks, allow_equal_weights=allowed)
        pipeline.forget_shapes()
        chunks[2].whole_model_name = lambda name: {}[name]  # type: ignore[assignment, misc]
        with pytest.raises(KeyError if mesh.stage == 2 else ldt.RemoteStageError):
            pipeline.forget_shapes()
        del chunks[2].whole_model_name
        layer.requires_grad_(True)
        try:
            pipeline.forget_shapes()
        except ldt.LdtError as error:
            return str(error)
        pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
    return ""


def test_a_layer_on_two_stages_that_is_trained_later(pool: RankPool) -> None:
    texts = pool.run(thawed, False, ranks=range(3))
    assert len(set(texts)) == 1
    assert "weight of chunk 0" in texts[0]
    assert "two stages hold it" in texts[0]
    assert pool.run(thawed, True, ranks=range(3)) == [""] * 3
