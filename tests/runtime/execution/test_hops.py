"""A hop carries several tensors of any dtype and layout, with different shapes for every microbatch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pipeline_jobs import build, job, step_and_compare
from torch import Tensor, nn

import ldt
from ldt.runtime import TensorSpec
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import LanePolicy, Topology

WORLD_SIZE = 4


def seeded(*modules: type[nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [module() for module in modules]


# -- several tensors per hop -------------------------------------------------------------------------------------


class ThreeOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(8, size) for size in (8, 4, 2)])

    def forward(self, a: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> tuple[Tensor, ...]:
        a = a if b is None or c is None else a + b.sum(-1, keepdim=True) * c.mean(-1, keepdim=True)
        return tuple(torch.tanh(part(a)) for part in self.parts)


class ThreeIn(ThreeOut):
    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(a, b, c)[0]


def three_tensors(stages: int, policy: LanePolicy) -> None:
    chunks = seeded(*[ThreeOut] * stages, ThreeIn)
    microbatches = [(torch.randn(3, 8), torch.randn(3, 8)) for _ in range(4)]
    job(Topology([1] * stages), lambda: (chunks, microbatches), policy=policy)


@pytest.mark.parametrize("policy", ["dedicated", "paired"])
@pytest.mark.parametrize("stages", [2, 4])
def test_three_tensors_per_hop(pool: RankPool, stages: int, policy: LanePolicy) -> None:
    pool.run(three_tensors, stages, policy, ranks=range(stages))


# -- shapes that change ------------------------------------------------------------------------------------------


def varying_shapes() -> None:
    torch.manual_seed(0)
    chunks = [ToyChunk(8) for _ in range(4)]
    shapes = [(7, 2, 8), (3, 2, 8), (11, 2, 8), (1, 1, 8)]
    microbatches = [(torch.randn(shape), torch.randn(shape)) for shape in shapes]
    with ldt.connect(Topology([1, 1, 1]), ranks=[0, 1, 2]) as mesh:
        pipeline = build(mesh, chunks)
        step_and_compare(mesh, pipeline, chunks, microbatches)
        step_and_compare(mesh, pipeline, chunks, microbatches[::-1])


def test_every_microbatch_may_have_another_shape(pool: RankPool) -> None:
    pool.run(varying_shapes, ranks=[0, 1, 2])


# -- dtypes, with and without gradient ---------------------------------------------------------------------------


class MixedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.linear(x)
        ids = torch.arange(4, device=x.device) * (x.shape[0] + 2**40)
        mask = torch.ones(2, 1, 8, 8, dtype=torch.bool, device=x.device).tril()
        return hidden.bfloat16(), ids, mask, x[:, 0].detach() / 2, hidden.sum().half().detach()


class MixedBody(nn.Module):
    """Checks its inputs and returns them; uses only the first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=torch.bfloat16)

    def forward(
        self, h: Tensor, ids: Tensor, mask: Tensor, plain: Tensor, scalar: Tensor
    ) -> tuple[Tensor, ...]:
        assert [t.dtype for t in (h, ids, mask, plain, scalar)] == [
            torch.bfloat16,
            torch.int64,
            torch.bool,
            torch.float32,
            torch.float16,
        ]
        assert h.requires_grad == torch.is_grad_enabled()
        assert not plain.requires_grad
        assert not scalar.requires_grad
        if type(ids) is Tensor:  # not while shapes are inferred
            assert ids.tolist() == [n * (8 + 2**40) for n in range(4)]
            assert torch.equal(mask, torch.ones(2, 1, 8, 8, dtype=torch.bool).tril())
        return self.linear(h), ids, mask, plain, scalar


class MixedTail(MixedBody):
    def forward(self, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        h, _, _, plain, scalar = super().forward(*tensors)
        return h.float() + plain[:, None] + scalar


def mixed_dtypes() -> None:
    chunks = seeded(MixedHead, MixedBody, MixedBody, MixedTail)
    microbatches = [(torch.randn(8, 2, 16), torch.randn(8, 2, 16)) for _ in range(3)]
    with ldt.connect(Topology([1, 1, 1]), ranks=[0, 1, 2]) as mesh:
        result = step_and_compare(mesh, build(mesh, chunks), chunks, microbatches)
        gradients = {name: count for name, count in result.stats.channels.items() if name[0] == "B"}
        assert {count.bytes for count in gradients.values()} == {3 * 8 * 2 * 16 * 2}, "only the bf16 tensor's"


def test_dtypes_with_and_without_gradient(pool: RankPool) -> None:
    pool.run(mixed_dtypes, ranks=[0, 1, 2])


# -- layouts -----------------------------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::2],
    "offset": lambda x: x[3:],
    "expanded": lambda x: x[:1].expand(4, -1),
    "channels_last": lambda x: x.reshape(1, 2, 2, -1).contiguous(memory_format=torch.channels_last),
}


class Layout(nn.Module):
    """Returns its product in the layout ``name``; the gradient of its input also has an unusual layout."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return LAYOUTS[self.name](x @ self.weight)


class Flatten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).flatten().sum().expand(3)  # an expanded gradient is sent back


def layouts(name: str) -> None:
    torch.manual_seed(0)
    chunks = [Layout(name), Flatten(), ToyChunk(3)]
    microbatches = [(torch.randn(8, 8), torch.randn(3)) for _ in range(3)]
    job(Topology([1, 1]), lambda: (chunks, microbatches))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_layouts(pool: RankPool, name: str) -> None:
    pool.run(layouts, name, ranks=[0, 1])


# -- things modules do -------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """Modifies its input, as ``nn.ReLU(inplace=True)`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.relu_())


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Identity(nn.Module):
    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors


class Unused(nn.Module):
    """Returns two outputs, the second of which the next chunk never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, ignored: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y * 2


class First(nn.Module):
    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return x * 1.5


class Twice(Head):
    """Returns one tensor twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, y


class Add(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * y)


class Counting(Head):
    """Counts its calls in a buffer, replaced or modified in place, and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("replaced", torch.zeros(1))
        self.norm = nn.BatchNorm1d(8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.calls += 1
        return super().forward(self.norm(x))


MODELS: dict[str, Sequence[type[nn.Module]]] = {
    "in place": (Head, InPlace, InPlace),
    "identity": (Head, Identity, Head),
    "unused output": (Head, Unused, First),
    "one tensor twice": (Head, Twice, Add),
    "buffers": (Counting, Counting, Counting),
}


def model(name: str, laps: int) -> None:
    chunks = seeded(*MODELS[name], *[Head] * (2 * (laps - 1)))
    microbatches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(3)]
    topology = Topology([1] * (2 if laps == 1 else 1), laps=1 if laps == 1 else 2)
    chunks = chunks[: topology.num_chunks] if laps == 1 else seeded(*MODELS[name])
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        step_and_compare(mesh, build(mesh, chunks), chunks, microbatches)
        for chunk in (chunks[index] for index in topology.chunks_of(mesh.stage)):
            if isinstance(chunk, Counting):
                assert chunk.calls == 3
                assert chunk.replaced.item() == 3
                assert type(chunk.replaced) is Tensor
                assert chunk.norm.num_batches_tracked is not None
                assert chunk.norm.num_batches_tracked.item() == 3


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_modules_do_between_stages(pool: RankPool, name: str) -> None:
    pool.run(model, name, 1, ranks=[0, 1])


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_modules_do_over_local_hops(pool: RankPool, name: str) -> None:
    pool.run(model, name, 2, ranks=[0])


class Random(Head):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5) * random.random() + torch.rand(1))


def random_numbers() -> None:
    """Shape inference must not consume random numbers: with one seed, stage 1's chunk returns what it returns alone."""
    chunks = seeded(Head, Random, Head)
    (x, y), *_ = microbatches = [(torch.randn(4, 8), torch.randn(4, 8))]
    torch.manual_seed(5)
    random.seed(5)
    alone = toy_loss(chunks[2](chunks[1](chunks[0](x))), y)
    with ldt.connect(Topology([1, 1]), ranks=[0, 1]) as mesh:
        pipeline = build(mesh, chunks)
        torch.manual_seed(5)
        random.seed(5)
        result = pipeline.step(microbatches if mesh.is_edge else None)
        if mesh.is_edge:
            assert result.losses is not None
            assert torch.equal(result.losses[0], alone.detach())


def test_finding_shapes_uses_no_random_numbers(pool: RankPool) -> None:
    pool.run(random_numbers, ranks=[0, 1])


# -- structured inputs, declared outputs -------------------------------------------------------------------------


class Keywords(Head):
    def forward(self, x: Tensor, *, scale: float, extra: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale + extra["bias"]


def keyword_inputs() -> None:
    chunks = seeded(Keywords, Head, Head)
    microbatches: list[Any] = [
        ({"x": torch.randn(4, 8), "scale": 1.0 + n, "extra": {"bias": torch.randn(8)}}, torch.randn(4, 8))
        for n in range(3)
    ]
    job(Topology([1, 1]), lambda: (chunks, microbatches))


def test_inputs_as_keywords(pool: RankPool) -> None:
    pool.run(keyword_inputs, ranks=[0, 1])


class Kept(Head):
    """The number of rows it keeps depends on values, so fake tensors cannot infer it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[: int(x.isfinite().sum().item()) // 8]


class Declared(Kept):
    def output_spec(self, spec: TensorSpec) -> TensorSpec:
        return TensorSpec(spec.shape, spec.dtype, requires_grad=True)


class WronglyDeclared(Kept):
    def output_spec(self, spec: TensorSpec) -> TensorSpec:
        return TensorSpec((spec.shape[0] + 1, *spec.shape[1:]), spec.dtype, requires_grad=True)


def declared_outputs() -> None:
    chunks = seeded(Declared, Declared, Head)
    job(Topology([1, 1]), lambda: (chunks, toy_microbatches(3, width=8)))


def test_declared_outputs(pool: RankPool) -> None:
    pool.run(declared_outputs, ranks=[0, 1])


def undeclared(kind: type[nn.Module], at: int) -> str:
    chunks = seeded(*[kind if index == at else Head for index in range(3)])
    with ldt.connect(Topology([1, 1]), ranks=[0, 1]) as mesh:
        pipeline = build(mesh, chunks)
        with pytest.raises(ldt.LdtError) as caught:
            pipeline.step(toy_microbatches(2, width=8) if mesh.is_edge else None)
        return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("at", [0, 1])
def test_a_chunk_whose_shapes_cannot_be_inferred(pool: RankPool, at: int) -> None:
    texts = pool.run(undeclared, Kept, at, ranks=[0, 1])
    assert all(f"cannot tell what chunk {at} (Kept) returns" in text for text in texts), texts
    assert all("output_spec" in text for text in texts)
    assert texts[1 - at].startswith("RemoteStageError: rank")


@pytest.mark.parametrize("at", [0, 1])
def test_an_output_that_is_not_what_was_declared(pool: RankPool, at: int) -> None:
    texts = pool.run(undeclared, WronglyDeclared, at, ranks=[0, 1])
    expected = "tensor 0 was agreed as float32[5, 8] with grad, got float32[4, 8] with grad"
    assert all(expected in text for text in texts), texts
    assert all(f"{at}F0" in text for text in texts[1 - at : 2 - at])


def toy_of_laps(laps: int) -> None:
    topology = Topology([1], laps=laps)
    job(topology, lambda: (toy_chunks(topology), toy_microbatches(2)))


def test_local_hops_only(pool: RankPool) -> None:
    pool.run(toy_of_laps, 2, ranks=[0])
