"""Sends read their tensors as late as possible: the tensors must not have changed by then."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from in_flight_chunks import KINDS, Keeping
from pipeline_jobs import assert_equal_grads, assert_equal_losses, build
from torch import Tensor, nn

import ldt
from ldt.errors import LdtError, RemoteStageError
from ldt.plan import Plan
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.testing.late_sends import each_kind_at_once, hold_sends
from ldt.topology import Topology

WORLD_SIZE = 3


# -- the gradient of an expanded parameter is the gradient that leaves ---------------------------------------------


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


class Position(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.zeros(rows, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pos.unsqueeze(0)


def dot(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def expanded_parameter(split: bool) -> None:
    rows, width = 3000, 4
    topology = Topology([1, 1])
    chunks = [Scale(width), Position(rows, width), nn.Identity()]
    batch = [(torch.ones(1, rows, width), torch.full((1, rows, width), 10.0**m)) for m in range(4)]
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks, dot, plan=each_kind_at_once(topology, 4, split))
        hold_sends(mesh)
        pipeline.step(batch if mesh.is_edge else None)
        if mesh.is_edge:
            assert chunks[0].w.grad.tolist() == [833_250.0] * width  # (1 + 10 + 100 + 1000) / 4 * 3000
        else:
            assert chunks[1].pos.grad.unique().tolist() == [1111 / 4]


@pytest.mark.parametrize("split", [False, True])
def test_a_gradient_in_flight_is_not_that_of_an_expanded_parameter(pool: RankPool, split: bool) -> None:
    pool.run(expanded_parameter, split, ranks=range(2))


# -- kept and modified tensors: equal to the unsplit model ---------------------------------------------------------


def kept(stages: int, split: bool) -> None:
    topology = Topology([1] * stages)
    plan = each_kind_at_once(topology, 4, split)
    with ldt.connect(topology, ranks=range(stages)) as mesh:
        for name, keep in KINDS.items():
            try:
                steps(mesh, plan, keep)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def steps(mesh: ldt.Mesh, plan: Plan, keep: Any) -> None:
    torch.manual_seed(0)
    chunks = [Keeping(keep, chunk == mesh.topology.tail) for chunk in range(mesh.topology.num_chunks)]
    reference: Sequence[nn.Module] = copy.deepcopy(chunks)
    batch = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(4)]
    pipeline = build(mesh, chunks, plan=plan)
    for _ in range(2):
        losses, reference = unsplit_step(reference, batch, toy_loss)
        hold_sends(mesh)
        result = pipeline.step(batch if mesh.is_edge else None)
        if mesh.is_edge:
            assert_equal_losses(result, losses)
        assert assert_equal_grads(mesh, chunks, reference) > 0
        for module in [*chunks, *reference]:
            module.zero_grad()
            module.kept = None  # tensors with a graph cannot be copied


@pytest.mark.parametrize(("stages", "split"), [(1, False), (3, False), (3, True)])
def test_what_is_kept_and_changed(pool: RankPool, stages: int, split: bool) -> None:
    pool.run(kept, stages, split, ranks=range(stages))


# -- the safety net: writing to a tensor in flight is an error -----------------------------------------------------


def written_to(kind: str) -> None:
    def write(label: str, tensors: Sequence[Tensor]) -> None:
        if label == f"{kind} microbatch 2":
            tensors[0].view(-1)[0] = 3.0

    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, toy_chunks(topology), plan=each_kind_at_once(topology, 4))
        hold_sends(mesh, write)
        chunk, what = {
            "F0": (0, "output"),
            "F1": (1, "output"),
            "B1": (2, "gradient"),
            "B0": (1, "gradient"),
        }[kind]
        batch = toy_microbatches(4) if mesh.is_edge else None
        if (topology.stage_of(chunk) == 0) != mesh.is_edge:
            with contextlib.suppress(
                RemoteStageError
            ):  # its step may be over by then, and raise in the next call
                pipeline.step(batch)
            return
        with pytest.raises(LdtError, match=f"chunk {chunk}, microbatch 2: {what} .*message {kind}.*clone()"):
            pipeline.step(batch)


@pytest.mark.parametrize("kind", ["F0", "F1", "B1", "B0"])
def test_writing_to_a_tensor_in_flight_is_an_error(pool: RankPool, kind: str) -> None:
    pool.run(written_to, kind, ranks=range(2))


# -- gradients that are being averaged over replicas ---------------------------------------------------------------


class Meddling(ToyChunk):
    """A head whose backward modifies a gradient of the tail while that is being averaged."""

    def __init__(self, tail: ToyChunk) -> None:
        super().__init__(16)
        self.tails = [tail]  # in a list, so that it is not a submodule

    def forward(self, x: Tensor) -> Tensor:
        def halve(_: Tensor) -> None:
            grad = self.tails[0].first.weight.grad
            if grad is not None:
                grad.mul_(0.5)

        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(halve)
        return y


def averaged() -> None:
    torch.manual_seed(0)
    topology = Topology([1], dp=2)
    tail = ToyChunk(16)
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, [Meddling(tail), tail])
        with pytest.raises(LdtError, match="changed while it was averaged over the replicas"):
            pipeline.step(toy_microbatches(1))


def test_a_gradient_that_is_averaged_must_be_left_alone(pool: RankPool) -> None:
    pool.run(averaged, ranks=range(2))


# -- outputs that eval keeps -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outputs:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    names: list[str]


class Static(nn.Module):
    """Returns static memory for every microbatch, as a captured graph does, and a freshly computed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("output", torch.zeros(2, 16))
        self.fresh: list[int] = []

    def forward(self, x: Tensor) -> list[Any]:
        static, fresh = self.output.copy_(x * 2), x * 3
        if type(x) is Tensor:
            self.fresh.append(fresh.data_ptr())
        return [{"logits": static}, Outputs(static[:1], (static.view(-1), fresh), ["fresh"])]


def kept_by_eval() -> None:
    inputs = [torch.full((2, 16), float(value)) for value in range(3)]
    with ldt.connect(Topology([1]), ranks=range(1)) as mesh:
        tail = Static()
        result = build(mesh, [nn.Identity(), tail]).eval([(x, None) for x in inputs])
        assert result.outputs is not None
        for (first, second), x, pointer in zip(result.outputs, inputs, tail.fresh, strict=True):
            assert torch.equal(first["logits"], x * 2)
            assert torch.equal(second.logits, x[:1] * 2)
            assert torch.equal(second.hidden[0], (x * 2).view(-1))
            assert second.hidden[1].data_ptr() == pointer, "what nobody else has is not copied"
            assert second.names == ["fresh"]


def test_outputs_that_eval_keeps_have_memory_of_their_own(pool: RankPool) -> None:
    pool.run(kept_by_eval, ranks=range(1))
