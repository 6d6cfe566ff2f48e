"""The check for NaN and infinities names the first tensor before it is sent; scaled gradients may overflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import ldt
from ldt.plan import Kind, ushape
from ldt.plan.schedules.passes import add_communication, remove_communication
from ldt.runtime.execution.nan_check import NanCheck
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
BAD = 2  # the bad microbatch

# -- single tensors ------------------------------------------------------------------------------------------------


def refused(output: Any) -> str | None:
    try:
        NanCheck(activations=True).outputs(1, BAD, output)
    except ldt.NonFiniteError as error:
        return f"{error} ({error.chunk}, {error.microbatch})"
    return None


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
)
def test_a_text_counts_what_is_not_finite(dtype: torch.dtype) -> None:
    x = torch.ones(2, 5, dtype=dtype)
    x[0, :3] = torch.tensor([math.nan, -math.inf, -math.inf])
    numbers = 20 if dtype.is_complex else 10
    name = str(dtype).removeprefix("torch.")
    text = (
        f"chunk 1, microbatch {BAD}: output 1, {name}[2, 5], has 1 NaN, 2 -inf of {numbers} values (1, {BAD})"
    )
    assert refused((torch.ones(1), x)) == text


@pytest.mark.parametrize(
    "output",
    [
        torch.full((3,), torch.finfo(torch.float64).max, dtype=torch.float64),
        torch.full((3,), torch.finfo(torch.float16).max, dtype=torch.float16),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.empty(0, 4),
        torch.arange(3),
        {"logits": torch.ones(3), "rest": None},
    ],
    ids=["float64", "float16", "float8", "empty", "int64", "dict"],
)
def test_finite_values_pass_whatever_their_type(output: Any) -> None:
    assert refused(output) is None


def test_sparse_and_narrow_types_are_looked_into() -> None:
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, math.inf], (4,), check_invariants=True)
    assert "has 1 +inf of 2 values" in (refused(sparse) or "")
    assert "has 1 NaN of 2 values" in (refused(torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)) or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_a_mask_passes_in_outputs_alone(dtype: torch.dtype) -> None:
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf).to(dtype)
    check = NanCheck(activations=True, gradients=True)
    check.outputs(1, BAD, (torch.ones(3), mask, mask[:1, 1:]))
    for call in (lambda: check.loss(1, BAD, mask), lambda: check.gradients(1, BAD, [mask])):
        with pytest.raises(ldt.NonFiniteError, match="has 3 -inf"):
            call()


def test_what_is_not_asked_for_is_not_looked_at() -> None:
    bad = torch.tensor([math.nan])
    parameter = nn.Parameter(bad)
    parameter.grad = bad
    for check in (NanCheck(), NanCheck(activations=True)):
        check.gradients(1, 0, [bad], [("weight", parameter)])
    for check in (NanCheck(), NanCheck(gradients=True)):
        check.outputs(1, 0, bad)
        check.loss(1, 0, bad)


# -- in a pipeline -------------------------------------------------------------------------------------------------


class Spoilt(torch.autograd.Function):
    """The identity, with one infinite element in its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = -math.inf
        return grad


class Broken(ToyChunk):
    """Breaks its third call: the output, the gradient of its input, or that of a parameter."""

    def __init__(self, where: str) -> None:
        super().__init__(16)
        self.where = where
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:  # during shape inference
            return super().forward(x)
        self.calls += 1
        spoil: Callable[[Tensor], Tensor] = Spoilt.apply if self.calls == BAD + 1 else Tensor.clone  # type: ignore[assignment]
        if self.where == "input":
            return super().forward(spoil(x))
        y = super().forward(x)
        if self.where == "parameter":
            y = y + nn.functional.linear(x.detach(), spoil(self.second.weight))
        if self.where == "output" and self.calls == BAD + 1:
            y[0, :2] = math.nan
        return y


class CountingTail(ToyChunk):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += type(x) is Tensor
        return super().forward(x)


def split_plan(topology: Topology) -> ldt.plan.Plan:
    """Return the fixed order with each backward split in two."""
    bare = remove_communication(ushape(topology, 4))
    parts = {Kind.B: (Kind.I, Kind.W)}
    rows = {
        node: tuple(a._replace(kind=kind) for a in row for kind in parts.get(a.kind, (a.kind,)))
        for node, row in bare.rows.items()
    }
    return add_communication(bare.with_rows(rows, None), "dedicated")


def bad_loss(output: Tensor, target: Tensor) -> Tensor:
    loss = (output - target).square().mean()
    return loss * math.inf if bool(target[0, 0] == 0) else loss


def caught(where: str, mode: str = "step", split: bool = False, **options: Any) -> tuple[str, str, Any]:
    """Return type and text of this rank's error, and on the edge the tail's calls, elsewhere the error's place."""
    topology = Topology([1, 1, 1])
    torch.manual_seed(0)
    chunks: list[nn.Module] = [*toy_chunks(topology)[:3], CountingTail(16)]
    batch = toy_microbatches(4)
    batch[BAD][1].zero_()
    with ldt.connect(topology) as mesh:
        if where in ("input", "parameter", "output"):
            chunks[1] = Broken(where)
        loss = {"loss_fn": bad_loss} if where == "loss" else {}
        if options.pop("scaled", False) and mesh.is_edge:  # optional on the cloud
            options["grad_scaler"] = ldt.GradScaler(mesh)
        options |= {"plan": split_plan(topology)} if split else {}
        pipeline = build(mesh, chunks, **{"check_finite": True, **loss, **options})
        try:
            getattr(pipeline, mode)(batch if mesh.is_edge else None)
        except ldt.LdtError as error:
            more = chunks[3].calls if mesh.is_edge else getattr(error, "place", None)
            return type(error).__name__, str(error), more
    return "", "", None


def test_an_output_is_named_before_it_is_sent(pool: RankPool) -> None:
    edge, bad, other = pool.run(caught, "output")
    text = f"chunk 1, microbatch {BAD}: output 0, float32[4, 16], has 2 NaN of 64 values"
    assert bad[:2] == ("NonFiniteError", text)
    for remote in (edge, other):
        assert remote[0] == "RemoteStageError"
        assert "rank 1 (stage 1, replica 0) failed first in action 1F2" in remote[1]
        assert text in remote[1]
    assert edge[2] <= BAD, "microbatches before it at most have come to the tail"


def test_the_loss_is_named_without_its_value(pool: RankPool) -> None:
    edge, *others = pool.run(caught, "loss")
    text = f"chunk 3, microbatch {BAD}: the loss, float32[], has 1 +inf of 1 values"
    assert edge[:2] == ("NonFiniteError", text)
    for remote in others:
        assert remote[0] == "RemoteStageError"
        assert remote[1].endswith(f"NonFiniteError: {text}"), (
            "texts of the package's own errors leave the edge"
        )


@pytest.mark.parametrize(("split", "kinds"), [(False, "BB"), (True, "IW")])
def test_gradients_are_named_where_they_are_made(pool: RankPool, split: bool, kinds: str) -> None:
    for where, name, kind in (
        ("input", "input 0, float32[4, 16]", kinds[0]),
        ("parameter", "second.weight, float32[16, 16]", kinds[1]),
    ):
        edge, bad, _ = pool.run(caught, where, "step", split)
        assert bad[0] == "NonFiniteError"
        assert bad[1].startswith(f"chunk 1, microbatch {BAD}: the gradient of {name}, has 1 -inf of ")
        assert edge[0] == "RemoteStageError"
        assert f"failed first in action 1{kind}{BAD} " in edge[1]


def test_scaled_gradients_may_overflow_and_outputs_may_not(pool: RankPool) -> None:
    assert pool.run(scaled_call, "input") == [""] * 3
    assert pool.run(scaled_call, "parameter") == [""] * 3
    assert pool.run(scaled_call, "output")[1] == "NonFiniteError"


def scaled_call(where: str) -> str:
    return caught(where, scaled=True)[0]


def test_eval_looks_at_outputs(pool: RankPool) -> None:
    edge, bad, _ = pool.run(caught, "output", "eval")
    assert bad[0] == "NonFiniteError"
    assert f"action 1F{BAD} " in edge[1]
    assert pool.run(caught, "input", "eval") == [("", "", None)] * 3


def unchecked() -> str:
    return caught("output", check_finite=False)[0]


def test_without_the_check_a_step_ends(pool: RankPool) -> None:
    assert pool.run(unchecked) == [""] * 3


# -- sharded parameters --------------------------------------------------------------------------------------------


class Sharded(nn.Module):
    """A weight whose rows are split over the stage; the last row's gradient, on the last rank, is not finite."""

    def __init__(self, mesh: ldt.Mesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(16, 16), mesh.tp_mesh, [Shard(0)]))
        self.scale = torch.ones(16)
        self.scale[-1] = math.inf
        self.scale = self.scale[mesh.tp_rank * 8 : mesh.tp_rank * 8 + 8, None]

    def forward(self, x: Tensor) -> Tensor:
        mine = self.weight.to_local(grad_placements=[Shard(0)])
        mine.register_hook(lambda grad: grad * self.scale)  # type: ignore[no-untyped-call]
        part = torch.cat([x @ mine.T, x @ mine.T], dim=-1)
        return x + 0.0 * part  # so that all ranks return the same


def sharded() -> tuple[str, str]:
    topology = Topology([1, 2])
    chunks = toy_chunks(topology)
    with ldt.connect(topology) as mesh:
        mine = chunks if mesh.is_edge else [chunks[0], Sharded(mesh), chunks[2]]
        pipeline = build(mesh, mine, check_finite=True)
        try:
            for _ in range(2):  # a member that waits for no rank may complete the first step
                pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        except ldt.LdtError as error:
            return type(error).__name__, str(error)
    return "", ""


def test_of_sharded_parameters_each_rank_looks_at_its_part(pool: RankPool) -> None:
    edge, clean, bad = pool.run(sharded)
    assert bad[0] == "NonFiniteError"
    assert bad[1].startswith("chunk 1, microbatch 0: the gradient of weight, float32[8, 16], has ")
    assert edge[0] == clean[0] == "RemoteStageError"
    assert bad[1] in clean[1]
