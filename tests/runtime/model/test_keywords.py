"""Tests the keyword arguments of chunks: metadata, rebuilt bit-equal on every stage, and on the edge any input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn

import ldt
from ldt.runtime import TensorSpec
from ldt.runtime.model.keywords import keywords_of
from ldt.testing import RankPool
from ldt.topology import LanePolicy, Topology

WORLD_SIZE = 4
HIDDEN, WORDS = 8, 11
Inputs = dict[str, Tensor]


class Masked(nn.Module):
    """Mixes the unmasked elements of a row by position, and records its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.seen: list[Inputs] = []

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, *, position_ids: Tensor | None = None
    ) -> Tensor:
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        if type(x) is Tensor:  # not while shapes are inferred
            self.seen.append({name: value.clone() for name, value in given.items() if value is not None})
        weights = torch.ones(x.shape[:2]) if attention_mask is None else attention_mask.float()
        positions = torch.zeros(x.shape[:2]) if position_ids is None else position_ids.float()
        mixed = (x * weights[..., None]).cumsum(1) + positions[..., None] / 100
        return torch.tanh(self.linear(mixed))


class Head(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        return super().forward(self.embedding(input_ids), attention_mask, position_ids=position_ids)


class Tail(Masked):
    """Takes an input that is available on the edge only."""

    def forward(  # type: ignore[override]
        self, x: Tensor, attention_mask: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        return super().forward(x, attention_mask) * scale


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.mean(-1) - target).square().mean()


MASKS = {
    "left": [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]],
    "both": [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]],
    "packed": [[1, 1, 2, 2, 2], [1, 2, 3, 3, 0]],
    "holes": [[1, 0, 1, 0, 1], [0, 1, 0, 0, 1]],
    "none": [[1] * 5] * 2,
}


def masked_batch(dtype: torch.dtype) -> list[tuple[Inputs, Tensor]]:
    """Return a microbatch for each kind of mask, one without masks, and ragged ones."""
    generator = torch.Generator().manual_seed(3)
    batch = []
    masks: list[Tensor | None] = [torch.tensor(rows).to(dtype) for rows in MASKS.values()]
    shapes = [(2, 5)] * (len(masks) + 1) + [(2, 7), (2, 3), (2, 11), (1, 1)]
    for index, shape in enumerate(shapes):
        inputs: dict[str, Any] = {"input_ids": torch.randint(0, WORDS, shape, generator=generator)}
        mask = masks[index] if index < len(masks) else None
        if mask is not None:
            inputs["attention_mask"] = mask
            inputs["position_ids"] = ((mask != 0).long().cumsum(-1) - 1).masked_fill(mask == 0, 1)
        inputs["scale"] = 0.5 if index % 2 else 1.0
        batch.append((inputs, torch.randn(shape, generator=generator)))
    return batch


def masked(stages: int, laps: int, policy: LanePolicy, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    topology = Topology([1] * stages, laps=laps)
    chunks: list[Any] = [Head(), *(Masked() for _ in range(topology.num_chunks - 2)), Tail()]
    batch = masked_batch(dtype)
    losses, grads = unsplit(chunks, batch)
    with ldt.connect(topology, lanes=policy, ranks=range(stages)) as mesh:
        local = topology.chunks_of(mesh.stage)
        for chunk in chunks:
            chunk.zero_grad()
            chunk.seen.clear()
        pipeline = build(mesh, chunks, loss)
        result = pipeline.step(batch if mesh.is_edge else None)
        if mesh.is_edge:
            assert all(map(torch.equal, result.losses or (), losses))
        for index in local:
            assert all(map(torch.equal, (p.grad for p in chunks[index].parameters()), grads[index]))
            check_seen(chunks[index].seen, batch, takes_positions=index != topology.tail)


def unsplit(chunks: list[Any], batch: list[tuple[Inputs, Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
    losses = []
    for given, target in batch:
        inputs = dict(given)
        x, scale = inputs.pop("input_ids"), inputs.pop("scale")
        for chunk in chunks[:-1]:
            x = chunk(x, **inputs)
        inputs.pop("position_ids", None)
        losses.append(loss(chunks[-1](x, scale=scale, **inputs), target))
        (losses[-1] / len(batch)).backward()
    return [one.detach() for one in losses], [[p.grad.clone() for p in c.parameters()] for c in chunks]


def check_seen(seen: list[Inputs], batch: list[tuple[Inputs, Tensor]], takes_positions: bool) -> None:
    """Compare masks bit for bit, with dtype and shape, in the order of microbatches."""
    assert len(seen) == len(batch)
    for got, (inputs, _) in zip(seen, batch, strict=True):
        names = {"attention_mask", *(["position_ids"] if takes_positions else [])} & set(inputs)
        assert set(got) == names
        for name in names:
            assert got[name].dtype == inputs[name].dtype
            assert torch.equal(got[name], inputs[name])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
@pytest.mark.parametrize(
    ("stages", "laps", "policy"), [(3, 1, "dedicated"), (2, 2, "paired"), (1, 2, "dedicated")]
)
def test_masks_of_every_kind(
    pool: RankPool, stages: int, laps: int, policy: LanePolicy, dtype: torch.dtype
) -> None:
    pool.run(masked, stages, laps, policy, dtype, ranks=range(stages))


class Wanting(nn.Module):
    """Requires a keyword argument that is available on the edge only."""

    def forward(self, x: Tensor, *, labels: Tensor) -> Tensor:
        return x


class Anything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[set[str]] = []

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        self.names.append(set(others))
        return x * 2.0


def refused(where: str) -> str:
    """Make a mistake that raises on every rank."""
    topology = Topology([1, 1])
    chunks: list[nn.Module] = [Head(), Wanting() if where == "cloud" else Masked(), Tail()]
    (inputs, target) = masked_batch(torch.int64)[0]
    inputs = {**inputs, **{"unknown": {"attention_masks": torch.ones(2, 5)}}.get(where, {})}
    if where == "float":
        inputs["attention_mask"] = inputs["attention_mask"].float()
    with (
        ldt.connect(topology, ranks=range(2)) as mesh,
        pytest.raises((ValueError, ldt.LdtError)) as caught,
    ):
        build(mesh, chunks, loss).step([(inputs, target)] if mesh.is_edge else None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        (
            "cloud",
            "chunk 1 (Wanting) requires the keyword argument 'labels', which is available on the edge only",
        ),
        ("unknown", "microbatch 0 has an input 'attention_masks' that no chunk takes"),
        ("float", "expected attention_mask of a bool or integer type, got float32"),
    ],
)
def test_unavailable_keywords_are_refused(pool: RankPool, where: str, sentence: str) -> None:
    for text in pool.run(refused, where, ranks=range(2)):
        assert sentence in text


def open_ended(microbatches: int) -> list[set[str]]:
    """A cloud chunk with ``**kwargs`` gets all metadata, and nothing else."""
    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=range(2)) as mesh:
        chunk = Anything()
        chunks = [Head(), chunk, Tail()]
        batch = masked_batch(torch.int64)[-microbatches:]
        build(mesh, chunks, loss).step(batch if mesh.is_edge else None)
        return chunk.names


def test_a_chunk_that_takes_anything(pool: RankPool) -> None:
    names = pool.run(open_ended, 6, ranks=range(2))[1]
    assert names[-6:] == [{"attention_mask", "position_ids"}, *[set()] * 5]


def test_keywords_of_functions() -> None:
    def function(a: int, /, b: int, c: int = 0, *, d: int, e: int = 0) -> None: ...

    found = keywords_of(function)
    assert found.names == {"b", "c", "d", "e"}
    assert found.positional == ("a", "b", "c")
    assert found.required == {"d"}
    offered = {name: name for name in "abcdef"}
    assert set(found.pick(offered)) == {"b", "c", "d", "e"}
    assert set(found.pick(offered, num_positional=2)) == {"c", "d", "e"}
    assert set(keywords_of(Anything()).pick(offered, num_positional=1)) == set(offered)
    assert keywords_of(torch.compile(Wanting())).required == {"labels"}


class Changing(Masked):
    """Modifies its mask in place."""

    def forward(  # type: ignore[override]
        self, x: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        y = super().forward(x, attention_mask, position_ids=position_ids)
        return y if attention_mask is None or type(x) is not Tensor else (attention_mask.mul_(3), y)[1]


def changing() -> tuple[list[Tensor], bool]:
    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=range(2)) as mesh:
        chunk = Changing()
        pipeline = build(mesh, [Head(), chunk, Tail()], loss)
        for call in (pipeline.step, pipeline.step, pipeline.eval, pipeline.eval):
            call(masked_batch(torch.int64)[:2] if mesh.is_edge else None)
        message = pipeline._steps._handshake._messages[0]
        shapes_only = all(tensor.is_meta for m in message.microbatches for tensor in m.tensors.values())
        return [given["attention_mask"] for given in chunk.seen], shapes_only


def test_a_chunk_may_change_what_it_is_given(pool: RankPool) -> None:
    """The next call passes unmodified metadata, even if the edge announces that nothing changed.

    Shapes of hops are found without the elements of metadata, on the edge and on the cloud.
    """
    found = pool.run(changing, ranks=range(2))
    assert [shapes_only for _, shapes_only in found] == [True, True]
    seen = found[1][0]
    expected = [inputs["attention_mask"] for inputs, _ in masked_batch(torch.int64)[:2]]
    assert len(seen) == 8
    assert all(torch.equal(mask, expected[index % 2]) for index, mask in enumerate(seen))


class Dropping(nn.Module):
    """Returns the rows that the mask selects; their number depends on the mask alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.linear(x[attention_mask.bool()])  # type: ignore[no-any-return]

    def output_spec(self, x: TensorSpec, attention_mask: Tensor) -> TensorSpec:
        return TensorSpec((int((attention_mask != 0).sum()), HIDDEN), x.dtype, requires_grad=True)


def dropping(chunk: int) -> list[int]:
    topology = Topology([1, 1, 1])
    chunks: list[nn.Module] = [
        Head(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.Linear(HIDDEN, HIDDEN),
        nn.Linear(HIDDEN, 1),
    ]
    chunks[chunk] = Dropping()
    batch = [(inputs, target) for inputs, target in masked_batch(torch.int64)[:5]]
    for inputs, _ in batch:
        del inputs["scale"], inputs["position_ids"]
        if chunk == 0:
            inputs["x"] = torch.randn(2, 5, HIDDEN)
            del inputs["input_ids"]
    with ldt.connect(topology, ranks=range(3)) as mesh:
        pipeline = build(mesh, chunks, lambda output, target: output.sum())
        hops = pipeline.validate(batch if mesh.is_edge else None)
        pipeline.step(batch if mesh.is_edge else None)
        return [specs[0].shape[0] for _, _, specs in hops]


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_shapes_may_depend_on_values_of_metadata(pool: RankPool, chunk: int) -> None:
    """Masks of one shape select different numbers of rows."""
    kept = [sum(map(sum, ([min(m, 1) for m in row] for row in rows))) for rows in list(MASKS.values())[:5]]
    assert len(set(kept)) > 2
    assert pool.run(dropping, chunk, ranks=range(3)) == [kept] * 3


def test_a_traced_module_has_no_names() -> None:
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(2))
    with pytest.raises(TypeError, match=r"which arguments .* takes, as torch\.jit\.trace"):
        keywords_of(traced)


class Forwarding(nn.Module):
    """Passes all that it gets to the module in it, under one of the names that wrappers use."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        setattr(self, name, inner)
        self._name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self._name)(*args, **kwargs)


def wrapped_by(kind: str, chunk: nn.Module) -> nn.Module:
    if kind == "averaged":
        return torch.optim.swa_utils.AveragedModel(chunk)
    if kind == "compiled":
        return torch.compile(chunk, backend="eager")  # type: ignore[return-value]
    if kind == "twice":
        return Forwarding("module", Forwarding("base_model", chunk))
    if kind == "peft":
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(chunk, peft.LoraConfig(target_modules=["linear"], r=2))  # type: ignore[no-any-return]
    return Forwarding(kind, chunk)


WRAPPERS = ["averaged", "compiled", "twice", "peft", "module"]


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers_are_seen_through(kind: str) -> None:
    assert keywords_of(wrapped_by(kind, Masked())) == keywords_of(Masked())
    assert keywords_of(Forwarding("model", Masked())).any_name, "many a module calls a part of it so"


def wrapped(kind: str) -> None:
    """A tail that takes no position_ids, in wrappers that would pass them on."""
    torch.manual_seed(0)
    topology = Topology([1, 1])
    chunks: list[Any] = [Head(), Masked(), Tail()]
    batch = masked_batch(torch.int64)
    losses, _ = unsplit(chunks, batch)
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, [wrapped_by(kind, chunk) for chunk in chunks], loss, allow_equal_weights=True)
        result = pipeline.step(batch if mesh.is_edge else None)
        if mesh.is_edge:
            torch.testing.assert_close(torch.stack(result.losses or []), torch.stack(losses))


@pytest.mark.parametrize("kind", [kind for kind in WRAPPERS if kind != "compiled"])
def test_chunks_in_wrappers_run(pool: RankPool, kind: str) -> None:
    pool.run(wrapped, kind, ranks=range(2))
