"""What a chunk may return: dicts, named tuples, ModelOutputs and None, bit-equal to the unsplit model."""

from __future__ import annotations

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
from pipeline_jobs import assert_equal_grads, assert_equal_losses, build
from torch import Tensor

import ldt
from ldt.plan import Costs, optimize
from ldt.runtime import TensorSpec
from ldt.runtime.common.output_marks import decode, encode_names, encode_none
from ldt.testing import RankPool, ToyChunk, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
NUMBER = 4
CPU = torch.device("cpu")
Pair = namedtuple("Pair", "hidden extra")


class Named(ToyChunk):
    """Returns hidden states and something beside in the form of ``kind``; nothing beside for a batch of one row."""

    def __init__(self, kind: str, last: bool) -> None:
        super().__init__(16)
        self.kind, self.last = kind, last

    def forward(
        self, hidden: Tensor, extra: Tensor | None = None, *, attention_mask: Tensor | None = None
    ) -> Any:
        if extra is not None:
            hidden = hidden + extra.sum()
        hidden = super().forward(hidden)
        if self.last:
            return hidden
        beside = None if len(hidden) == 1 else torch.tanh(hidden)
        if self.kind == "dict":
            return {"extra": beside, "hidden": hidden}
        if self.kind == "ModelOutput":
            output = pytest.importorskip("transformers.modeling_outputs").BaseModelOutputWithPooling
            renamed = output(last_hidden_state=hidden, pooler_output=beside)
            return Renamed(hidden=renamed.last_hidden_state, extra=renamed.pooler_output)
        return Pair(hidden, beside) if self.kind == "namedtuple" else (hidden, beside)


def renamed() -> Any:
    from dataclasses import dataclass

    generic = pytest.importorskip("transformers.utils.generic")

    @dataclass
    class Renamed(generic.ModelOutput):  # type: ignore[misc, name-defined]
        hidden: Tensor | None = None
        extra: Tensor | None = None

    return Renamed


Renamed: Any = renamed()


def batch(number: int = NUMBER) -> list[tuple[Tensor, Tensor]]:
    """The second microbatch has one row."""
    return [
        (x[: 1 if m == 1 else 4], y[: 1 if m == 1 else 4])
        for m, (x, y) in enumerate(toy_microbatches(number))
    ]


def unsplit(chunks: list[Any], microbatches: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Any]]:
    model = copy.deepcopy(chunks)
    losses = []
    for x, y in microbatches:
        output: Any = (x,)
        for chunk in model:
            if isinstance(output, dict):
                output = chunk(**output)
            else:
                output = chunk(*(output if isinstance(output, tuple) else (output,)))
        losses.append(toy_loss(output, y))
        (losses[-1] / len(microbatches)).backward()
    return [loss.detach() for loss in losses], model


def step(topology: Topology, kind: str, split: bool) -> None:
    torch.manual_seed(0)
    chunks: list[Any] = [Named(kind, index == topology.tail) for index in range(topology.num_chunks)]
    losses, reference = unsplit(chunks, batch())
    plan = optimize(topology, NUMBER, Costs(1.0, 2.0, weight=1.0), split_backward=True) if split else None
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks, plan=plan)
        for _ in range(2):
            for chunk in chunks:
                chunk.zero_grad()
            result = pipeline.step(batch() if mesh.is_edge else None)
            if mesh.is_edge:
                assert_equal_losses(result, losses)
            assert_equal_grads(mesh, chunks, reference)
        evaluated = pipeline.eval(batch() if mesh.is_edge else None)
        if mesh.is_edge:
            assert_equal_losses(evaluated, losses)
        pipeline.validate(batch() if mesh.is_edge else None)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", ["dict", "ModelOutput", "namedtuple", "tuple"])
def test_a_step_equals_the_unsplit_model(pool: RankPool, kind: str, split: bool) -> None:
    pool.run(step, Topology([1, 1, 1]), kind, split, ranks=range(3))


@pytest.mark.parametrize(
    "topology", [Topology([1, 2]), Topology([1]), Topology([1, 1], laps=2)], ids=Topology.to_text
)
def test_other_topologies(pool: RankPool, topology: Topology) -> None:
    pool.run(step, topology, "dict", False, ranks=range(topology.world_size))


class Wrong(Named):
    """The None of its output depends on data, or the output has something else."""

    def forward(self, hidden: Tensor, extra: Tensor | None = None, **_: Any) -> Any:
        hidden = ToyChunk.forward(self, hidden)
        if self.kind == "number":
            return {"hidden": hidden, "extra": 3}
        if self.kind == "nothing":
            return {"hidden": None}
        if self.kind == "nested":
            return {"hidden": hidden, "extra": (hidden, hidden)}
        if self.kind == "mark":
            return hidden, torch.empty(0, 0, 1, 5, dtype=torch.uint8)
        if self.kind == "sparse":
            return {"hidden": hidden.relu().to_sparse()}
        return {"hidden": hidden, "extra": None if type(hidden) is Tensor else hidden}


WRONG = {
    "number": r"chunk 1 must return a tensor, or a tuple or a dict of tensors and None, got dict of Tensor, int",
    "nothing": r"chunk 1 must return .*, got dict of NoneType",
    "nested": r"chunk 1 must return .*, got dict of Tensor, tuple",
    "sparse": r"output of chunk 1.*without plain memory to send.*call to_dense\(\)",
    "mark": r"chunk 1 returns an empty tensor of uint8 and shape \[0, 0, 1, 5\], which stands for None or a name",
    "data": r"output of chunk 1 for microbatch 0 is not what was agreed: tensor \d was agreed as float32.*, got None",
}


def wrong(kind: str) -> None:
    topology = Topology([1, 1, 1])
    chunks = [Wrong(kind, last=False) if index == 1 else Named("tuple", index == 3) for index in range(4)]
    with ldt.connect(topology, ranks=range(3)) as mesh:
        pipeline = build(mesh, chunks)
        with pytest.raises((ldt.LdtError, TypeError, ValueError), match=WRONG[kind]):
            pipeline.step(batch() if mesh.is_edge else None)


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_sent_is_refused_by_name(pool: RankPool, kind: str) -> None:
    pool.run(wrong, kind, ranks=range(3))


@pytest.mark.parametrize("name", ["x", "hidden", "encoder_hidden_states", "Größe", "a" * 100])
def test_names_come_back(name: str) -> None:
    x = torch.ones(2)
    made = [x, encode_none(CPU), *encode_names({name: x, "other": encode_none(CPU), name * 2: x}, CPU), x]
    for values in (made, [TensorSpec.of(tensor) for tensor in made]):
        args, named = decode(values)
        assert [arg if arg is None else tuple(arg.shape) for arg in args] == [(2,), None, (2,)]
        assert list(named) == [name, "other", name * 2]
        assert named["other"] is None
    assert sum(tensor.numel() for tensor in made) == 8, "marks take no bytes"
